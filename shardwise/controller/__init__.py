"""Places workers on ranks and calls their methods. Knows no machine learning."""

"""The optimizers: their groups, states, schedules and what scales their gradients."""

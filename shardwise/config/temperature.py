"""The temperatures that logits can be divided by, in every engine."""

from typing import Annotated

from pydantic import Field

LEAST_TEMPERATURE = 1e-6
"""At lower temperatures SGLang takes the likeliest token, and float32 holds none below 1e-45."""
LARGEST_TEMPERATURE = 1e6
"""Long before this, every token is as likely as the others; float32 holds no temperature above 3e38."""

Temperature = Annotated[float, Field(ge=LEAST_TEMPERATURE, le=LARGEST_TEMPERATURE)]

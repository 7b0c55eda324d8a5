"""Which temperatures logits can be divided by, whatever computes it."""

from typing import Annotated

from pydantic import Field

LEAST_TEMPERATURE = 1e-6
"""SGLang takes the likeliest token at lower ones, and float32 holds none below 1e-45."""
LARGEST_TEMPERATURE = 1e6
"""Every token is as likely as the others long before, and float32 holds none above 3e38."""

Temperature = Annotated[float, Field(ge=LEAST_TEMPERATURE, le=LARGEST_TEMPERATURE)]

"""The base of every section of a recipe."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A section of a recipe; unknown keys are refused."""

    # The docstrings below fields become their descriptions in docs/reference/recipes.md.
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

"""The JSON schema of a config, for editors: of what its YAML may hold, short forms included."""

from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from shardwise.config.base import Config, as_list
from shardwise.config.reference import describe


def json_schema(cls: type[Config]) -> dict[str, Any]:
    """Returns the JSON schema of a config class, with descriptions. It refuses no config that `Config.load` takes, and
    takes some that it refuses: which keys go together, only `load` knows."""
    describe(cls)
    return cls.model_json_schema(schema_generator=_WithShortForms)


class _WithShortForms(GenerateJsonSchema):
    """Knows what may stand for more than it is: the only entry of a list, the name of a choice, an import path.

    What it is given are pydantic's core schemas."""

    def function_before_schema(self, schema: Any) -> JsonSchemaValue:
        whole = super().function_before_schema(schema)
        return {"anyOf": [whole["items"], whole]} if schema["function"]["function"] is as_list else whole

    def list_schema(self, schema: Any) -> JsonSchemaValue:
        whole = super().list_schema(schema)
        is_of_choices = schema.get("items_schema", {}).get("type") == "tagged-union"
        return {"anyOf": [whole["items"], whole]} if is_of_choices else whole

    def tagged_union_schema(self, schema: Any) -> JsonSchemaValue:
        groups = super().tagged_union_schema(schema)["oneOf"]
        return {"anyOf": [*groups, {"enum": list(schema["choices"])}, {"type": "string", "pattern": ":"}]}

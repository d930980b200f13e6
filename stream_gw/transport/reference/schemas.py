"""JSON Schemas of msgspec types, as the reference documents have them."""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache
from typing import Any, get_origin

import msgspec

REF = "#/components/schemas/{name}"


def schemas_of(types: list[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the schemas of the types by ``type_key``, and those of the structs within them by name."""
    schemas, components = msgspec.json.schema_components(types, ref_template=REF)
    by_type = {type_key(type_): portable(schema) for type_, schema in zip(types, schemas, strict=True)}
    named = {name: portable(schema) for name, schema in components.items()}
    for struct in _structs(types):
        _describe_fields(named, struct)
    return by_type, dict(sorted(named.items()))


def type_key(type_: Any) -> str:
    """Return the name of a type in the results of ``schemas_of``."""
    return repr(type_)


def portable(schema: Any) -> Any:
    r"""Rewrite what JSON Schema writes differently: ``\Z`` of Python's patterns is ``$``."""
    if isinstance(schema, dict):
        made = {name: portable(value) for name, value in schema.items()}
        if isinstance(pattern := made.get("pattern"), str):
            made["pattern"] = pattern.removesuffix(r"\Z") + ("$" if pattern.endswith(r"\Z") else "")
        if isinstance(about := made.get("description"), str):
            made["description"] = _prose(about)
        return made
    return [portable(each) for each in schema] if isinstance(schema, list) else schema


def _structs(types: list[Any]) -> list[type[msgspec.Struct]]:
    """Return every struct within the types."""
    found: dict[type[msgspec.Struct], None] = {}

    def add(info: msgspec.inspect.Type) -> None:
        if isinstance(info, msgspec.inspect.StructType):
            if info.cls not in found:
                found[info.cls] = None
                for field in info.fields:
                    add(field.type)
        elif isinstance(info, msgspec.inspect.UnionType):
            for each in info.types:
                add(each)
        elif isinstance(info, msgspec.inspect.Metadata):
            add(info.type)
        elif isinstance(info, msgspec.inspect.DictType):
            add(info.value_type)
        elif isinstance(info, msgspec.inspect.ListType | msgspec.inspect.VarTupleType):
            add(info.item_type)

    for info in msgspec.inspect.multi_type_info(types):
        add(info)
    return list(found)


def _describe_fields(components: dict[str, Any], struct: type[msgspec.Struct]) -> None:
    """Add the docstrings below a struct's fields to its schema."""
    properties = components.get(struct.__name__, {}).get("properties", {})
    docs = field_docs(struct)
    for field in msgspec.structs.fields(struct):
        if docs.get(field.name) and field.encode_name in properties:
            properties[field.encode_name] = {"description": docs[field.name], **properties[field.encode_name]}


def field_docs(struct: Any) -> dict[str, str]:
    """Return the docstring below each field, by the field's name; empty where a field has none."""
    struct = get_origin(struct) or struct
    docs: dict[str, str] = {field.name: "" for field in msgspec.structs.fields(struct)}
    for base in reversed(struct.__mro__):
        if base.__module__.partition(".")[0].startswith("stream_"):
            docs.update(_docs_of_module(base.__module__).get(base.__name__, {}))
    return docs


@cache
def _docs_of_module(module: str) -> dict[str, dict[str, str]]:
    """Return the docstrings below the fields of a module's classes, by class and field."""
    found: dict[str, dict[str, str]] = {}
    try:
        source = inspect.getsource(sys.modules[module])
    except (OSError, TypeError):  # installed without its source
        return found
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        docs = found.setdefault(node.name, {})
        for field, below in zip(node.body, node.body[1:], strict=False):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    docs[name] = _prose(inspect.cleandoc(text))
    return found


def _prose(docstring: str) -> str:
    """Turn a docstring into Markdown that speaks of JSON."""
    text = " ".join(docstring.split()).replace("``", "`")
    return text.replace("None:", "null:").replace("True:", "true:").replace("False:", "false:")

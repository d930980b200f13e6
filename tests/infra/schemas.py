"""Schemas for kubeconform: the API server's own description of its kinds, and KEDA's definitions, as
``make helm`` finds them in the modules of the versions that it builds; and what we use of the Prometheus operator's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Schema = dict[str, Any]


def write(share: Path, folder: Path) -> str:
    """Fills the folder; gives kubeconform's ``-schema-location``."""
    definitions = json.loads((share / "kubernetes.json").read_text())["definitions"]
    for name, definition in definitions.items():
        # The server accepts more than its description says
        if name.endswith("IntOrString"):
            definition["type"] = ["string", "integer"]
            definition.pop("format", None)
        elif name.endswith("resource.Quantity"):
            definition["type"] = ["string", "number"]
        _close(definition)
    (folder / "_kubernetes.json").write_text(json.dumps({"definitions": definitions}))
    for name, definition in definitions.items():
        for kind in definition.get("x-kubernetes-group-version-kind", ()):
            schema = {"$ref": f"_kubernetes.json#/definitions/{name}"}
            _put(folder, kind["kind"], kind["group"], kind["version"], schema)
    for crd in [*keda(share), *monitoring()]:
        for version in crd["spec"]["versions"]:
            schema = version["schema"]["openAPIV3Schema"]
            _close(schema)
            _put(folder, crd["spec"]["names"]["kind"], crd["spec"]["group"], version["name"], schema)
    return str(folder) + "/{{ .ResourceKind }}{{ .KindSuffix }}.json"


def keda(share: Path) -> Iterator[Schema]:
    for path in sorted((share / "keda" / "crd" / "bases").glob("keda.sh_*.yaml")):
        yield from yaml.load_all(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def monitoring() -> Iterator[Schema]:
    """Schemas of the Prometheus operator's kinds with only the fields that the chart uses, to find wrong names."""
    selector = _object({"matchLabels": {"type": "object", "additionalProperties": {"type": "string"}}})
    endpoint = _object({name: {"type": "string"} for name in ("port", "path", "interval")}, "port")
    service = {
        "jobLabel": {"type": "string"},
        "selector": selector,
        "endpoints": {"type": "array", "items": endpoint},
    }
    words = {"type": "object", "additionalProperties": {"type": "string"}}
    rule = {name: {"type": "string"} for name in ("alert", "record", "expr", "for")}
    rules = {"type": "array", "items": _object({**rule, "labels": words, "annotations": words}, "expr")}
    group = _object({"name": {"type": "string"}, "interval": {"type": "string"}, "rules": rules}, "name")
    yield _definition("ServiceMonitor", _object(service, "selector", "endpoints"))
    yield _definition("PrometheusRule", _object({"groups": {"type": "array", "items": group}}))


def _definition(kind: str, spec: Schema) -> Schema:
    group, plural = "monitoring.coreos.com", f"{kind.lower()}s"
    texts = {name: {"type": "string"} for name in ("apiVersion", "kind")}
    whole = _object({**texts, "metadata": {"type": "object"}, "spec": spec}, "spec")
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": whole}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
            "versions": [version],
        },
    }


def _object(properties: Schema, *required: str) -> Schema:
    needed = {"required": list(required)} if required else {}
    return {"type": "object", "properties": properties, **needed}


def _put(folder: Path, kind: str, group: str, version: str, schema: Schema) -> None:
    name = "-".join(part for part in (kind.lower(), group.partition(".")[0], version) if part)
    (folder / f"{name}.json").write_text(json.dumps(schema))


def _close(schema: Any) -> None:
    """Let no object have other fields than it names."""
    if isinstance(schema, list):
        for one in schema:
            _close(one)
    elif isinstance(schema, dict):
        if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
            schema.setdefault("additionalProperties", False)
        for one in schema.values():
            _close(one)

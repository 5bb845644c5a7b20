"""JSON schemas from KubeRay's definition of a RayJob, for tests without a cluster.

    python tests/launch/crd.py ray.io_rayjobs.yaml > tests/launch/rayjob_crd_VERSION.json

The argument is a file of KubeRay's repository, in `helm-chart/kuberay-operator/crds/`, at the tag
of a version. The results are derived from it: Copyright the KubeRay Authors, Apache License 2.0,
whose text is in LICENSE. Descriptions, defaults and the status are dropped, and so are the rules
in CEL: none concerns a field that rlcore writes. Unknown fields are errors, as with `kubectl apply
--validate=strict`. A definition leaves metadata to Kubernetes, whose rules stand here.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

NAME = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
METADATA = {
    "type": "object",
    "required": ["name"],
    "additionalProperties": False,
    "properties": {
        # KubeRay appends up to 16 characters for the names of pods, which have at most 63
        "name": {"type": "string", "pattern": NAME, "maxLength": 47},
        "namespace": {"type": "string", "pattern": NAME, "maxLength": 63},
        "labels": TEXTS,
        "annotations": TEXTS,
    },
}
KEPT = ("type", "enum", "pattern", "required", "minimum", "maximum", "minItems", "maxItems")
KEPT += ("minLength", "maxLength")
SHARED = 150  # characters; a part that is longer and occurs twice is written once


def schema(definition: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of version v1 of a CustomResourceDefinition."""
    (found,) = (v for v in definition["spec"]["versions"] if v["name"] == "v1")
    whole = _strict(found["schema"]["openAPIV3Schema"])
    del whole["properties"]["status"]
    whole["properties"] |= {
        "apiVersion": {"const": f"{definition['spec']['group']}/v1"},
        "kind": {"const": definition["spec"]["names"]["kind"]},
        "metadata": METADATA,
    }
    whole["required"] = ["apiVersion", "kind", "metadata", "spec"]
    return whole


def _strict(part: dict[str, Any]) -> dict[str, Any]:
    """`part` of an OpenAPI schema as JSON schema, without fields that it does not name."""
    strict = {key: part[key] for key in KEPT if key in part}
    if "properties" in part:
        strict["properties"] = {name: _strict(inner) for name, inner in part["properties"].items()}
        strict["additionalProperties"] = part.get("x-kubernetes-preserve-unknown-fields", False)
    if isinstance(part.get("additionalProperties"), dict):
        strict["additionalProperties"] = _strict(part["additionalProperties"])
    if "items" in part:
        strict["items"] = _strict(part["items"])
    if "anyOf" in part:
        strict["anyOf"] = [_strict(choice) for choice in part["anyOf"]]
    if part.get("nullable") and "type" in strict:
        strict["type"] = [strict["type"], "null"]
    return strict


def shared(whole: dict[str, Any]) -> dict[str, Any]:
    """`whole` with every long part that occurs more than once under `$defs`."""
    count = Counter(_text(part) for part in _parts(whole))
    names: dict[str, str] = {}
    definitions: dict[str, Any] = {}

    def short(node: Any, name: str) -> Any:
        if isinstance(node, list):
            return [short(inner, name) for inner in node]
        if not isinstance(node, dict):
            return node
        text = _text(node)
        repeated = "type" in node and count[text] > 1 and len(text) > SHARED
        if repeated and text in names:
            return {"$ref": f"#/$defs/{names[text]}"}
        inside = {key: short(inner, name if key == "items" else key) for key, inner in node.items()}
        if not repeated:
            return inside
        names[text] = f"{name}-{len(names)}"
        definitions[names[text]] = inside
        return {"$ref": f"#/$defs/{names[text]}"}

    return short(whole, "job") | {"$defs": definitions}


def _parts(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        yield node
    elif not isinstance(node, list):
        return
    for inner in node.values() if isinstance(node, dict) else node:
        yield from _parts(inner)


def _text(node: Any) -> str:
    return json.dumps(node, sort_keys=True)


def main() -> None:
    written = shared(schema(yaml.safe_load(Path(sys.argv[1]).read_text())))
    definitions = written.pop("$defs")
    lines = [f"{json.dumps(name)}: {json.dumps(part)}" for name, part in definitions.items()]
    print('{"$defs": {', ",\n".join(lines), "},", json.dumps(written)[1:], sep="\n")


if __name__ == "__main__":
    main()

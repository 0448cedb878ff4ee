"""The user's own pod template, merged into the pods of a manifest by the rules of strategic merge.

A template may come from anyone: it is read within limits, and what the launch needs of a pod stays
as it is. The names of a list's merge keys are those of Kubernetes' API.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from drumline.base.errors import UsageError, as_list
from drumline.base.text import plural
from drumline.launch.hosts import read_flag_file
from drumline.launch.kubernetes import RESERVED

FLAG = "--pod-template"
MAX_BYTES = 1 << 16
MAX_DEPTH = 40
MAX_SCALAR = 64
"""Of what is no text: PyYAML takes quadratic time for a long number."""
MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "resourceClaims": "name",
    "schedulingGates": "name",
}
APPENDED = ("tolerations",)
PATCH = "$patch"
# A volume has one source: one of the same name takes its place.
REPLACED = ("volumes", "resourceClaims")
OF_TEMPLATE = ("apiVersion", "kind", "metadata", "spec")
OF_METADATA = ("labels", "annotations")
FIXED_IN_POD = ("restartPolicy", "subdomain", "hostname", "setHostnameAsFQDN")
FIXED_IN_CONTAINER = ("image", "command", "args")


class TemplateError(Exception):
    """What is wrong with the template, and where in it."""


# Reading


def read_pod_template(path: Path) -> dict[str, Any]:
    """The template, in the form of a Job's or a Pod's own: `metadata` and `spec`."""
    text = read_flag_file(path, f"{FLAG} {path}", flag=FLAG, most=MAX_BYTES)
    try:
        documents = list(documents_of(text))
        if len(documents) != 1:
            raise TemplateError(f"{plural(len(documents), 'document')}; one pod template is needed")
        _check_form(documents[0])
    except TemplateError as error:
        what = f"{FLAG} {path}: {error}"
        next_step = "give the metadata and spec of a pod, as under `template:` of a Job"
        raise UsageError(what, next_step=next_step) from error
    template: dict[str, Any] = documents[0]
    return template


def _check_form(template: Any) -> None:
    """Raise unless it has the form of a pod, or of the template in a Job."""
    _check_fields(template, "the template", OF_TEMPLATE)
    if template.get("kind", "Pod") != "Pod":
        raise TemplateError(f"it is a {template['kind']!r}, not a pod")
    _check_fields(template.get("metadata", {}), "metadata", OF_METADATA)
    if not isinstance(template.get("spec"), dict):
        raise TemplateError("it has no spec")


def _check_fields(value: Any, where: str, fields: Sequence[str]) -> None:
    """Raise unless it is a mapping with no other fields than these."""
    if not isinstance(value, dict):
        raise TemplateError(f"{where} is not a mapping")
    if unknown := [key for key in value if key not in fields]:
        raise TemplateError(f"{where} has {unknown[0]!r}; only {', '.join(fields)} can be given")


def documents_of(text: str) -> Iterator[Any]:
    """The documents of a YAML text as JSON could hold them: no aliases, tags and double keys."""
    try:
        import yaml
    except ImportError as error:
        what = f"{FLAG} needs PyYAML, which is not installed"
        raise UsageError(what, next_step="pip install 'drumline[kubernetes]'") from error

    try:
        _check_events(yaml.parse(text, yaml.SafeLoader))
        for node in yaml.compose_all(text, yaml.SafeLoader):
            yield _value_of(node)
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise TemplateError(f"it is not YAML: {reason}") from error


def _check_events(events: Iterator[Any]) -> None:
    """Before anything is built from them: aliases make a few lines gigabytes."""
    depth = 0
    for event in events:
        kind = type(event).__name__
        depth += kind.endswith("StartEvent") - kind.endswith("EndEvent")
        line = event.start_mark.line + 1
        if depth > MAX_DEPTH:
            raise TemplateError(f"line {line} is nested too deep")
        if kind == "AliasEvent" or getattr(event, "anchor", None):
            raise TemplateError(f"line {line} has an anchor or an alias; write the value out")
        if getattr(event, "tag", None):
            raise TemplateError(
                f"line {line} has the tag {event.tag!r}; only plain values are read"
            )


def _value_of(node: Any) -> Any:
    """The value of a node of YAML, as JSON has it."""
    import yaml

    if isinstance(node, yaml.SequenceNode):
        return [_value_of(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return _mapping_of(node)

    kind = node.tag.rpartition(":")[2]
    if kind not in ("int", "float", "bool", "null"):
        return node.value  # a date too: JSON has none
    line = node.start_mark.line + 1
    if len(node.value) > MAX_SCALAR:
        raise TemplateError(f"the number in line {line} is too long")
    return yaml.SafeLoader("").construct_object(node)


def _mapping_of(node: Any) -> dict[str, Any]:
    """Of a key that is there twice, YAML would silently lose the first value."""
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = _key_of(key_node)
        if key in values:
            raise TemplateError(f"{key!r} in line {key_node.start_mark.line + 1} is there twice")
        values[key] = _value_of(value_node)
    return values


def _key_of(node: Any) -> str:
    """The text of a key; a merge key (`<<`) is none."""
    if not isinstance(node.value, str) or node.tag.endswith(":merge"):
        raise TemplateError(f"a key in line {node.start_mark.line + 1} is not text")
    text: str = node.value
    return text


# Merging


def merged_manifest(text: str, template: Mapping[str, Any], path: Path) -> str:
    """The manifest with the template merged into each of its pods. Its comments are lost but for
    those at its start."""
    problems = list[str]()
    documents = list(documents_of(text))
    for pod in pods_of(documents):
        before = json.loads(json.dumps(pod))
        try:
            merge_into(pod, template, "")
            problems += _contradictions(before, pod)
        except TemplateError as error:
            problems.append(str(error))

    if problems:
        named = list(dict.fromkeys(problems))
        heading = f"{plural(len(named), 'problem')} in {FLAG} {path}:"
        next_step = "leave out what the launch sets; its flags are in drumline launch --help"
        raise UsageError(as_list(heading, named), next_step=next_step)
    comments = [line for line in text.splitlines() if line.startswith("#")]
    return "\n".join([*comments, yaml_text(documents)])


def pods_of(value: Any) -> Iterator[dict[str, Any]]:
    """The pod templates in objects."""
    if isinstance(value, dict) and "containers" in (value.get("spec") or {}):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from pods_of(inner)


def merge_into(target: dict[str, Any], patch: Mapping[str, Any], where: str) -> None:
    """Strategic merge of two mappings: null deletes, and so does `$patch: delete`."""
    for key, value in patch.items():
        field = f"{where}.{key}" if where else key
        if key == PATCH:
            continue  # the caller has read it
        if key.startswith("$"):
            raise TemplateError(f"{field}: of the directives only $patch is read")
        directive = _directive(value, field)
        current = target.get(key)
        is_structure = isinstance(current, dict | list)
        if is_structure and directive is None and type(value) not in (type(current), type(None)):
            needed = "a mapping" if isinstance(current, dict) else "a list"
            raise TemplateError(f"{field}: it is not {needed}")
        if value is None or directive == "delete":
            target.pop(key, None)
        elif isinstance(value, dict):
            merged = current if isinstance(current, dict) and directive != "replace" else {}
            merge_into(merged, value, field)
            target[key] = merged
        elif isinstance(value, list):
            target[key] = _merged_list(current, value, key, field)
        else:
            target[key] = value


def _directive(value: Any, field: str) -> str | None:
    """What `$patch` says in a mapping; None: nothing."""
    if not isinstance(value, dict) or PATCH not in value:
        return None
    directive: str = value[PATCH]
    if directive not in ("delete", "replace", "merge"):
        raise TemplateError(f"{field}: {PATCH} is {directive!r}, not delete, replace or merge")
    return directive


def _merged_list(current: Any, items: list[Any], name: str, where: str) -> list[Any]:
    """A list with a merge key is merged item by item; another one is replaced."""
    # An item that is only the directive is for the whole list.
    whole = [item for item in items if isinstance(item, dict) and set(item) == {PATCH}]
    replaces = [_directive(item, where) for item in whole] == ["replace"]
    new_items = [item for item in items if item not in whole]
    result = [] if replaces or not isinstance(current, list) else list(current)
    if name in APPENDED:
        return result + [item for item in new_items if item not in result]

    merge_key = MERGE_KEYS.get(name)
    if merge_key is None:
        return new_items
    for item in new_items:
        if not isinstance(item, dict) or not isinstance(item.get(merge_key), str | int):
            raise TemplateError(f"{where}: an item has no {merge_key}, by which it is merged")
        _merge_item(result, item, merge_key, name, where)
    return result


def _merge_item(
    items: list[Any], patch: dict[str, Any], merge_key: str, name: str, where: str
) -> None:
    """Merge one item into the list, by its name or whatever the merge key is."""
    identity = patch[merge_key]
    field = f"{where}[{identity}]"
    directive = _directive(patch, field)
    matching = [number for number, item in enumerate(items) if item.get(merge_key) == identity]
    position = matching[0] if matching else len(items)
    here = slice(position, position + 1)
    if directive == "delete":
        items[here] = []
        return

    starts_anew = not matching or directive == "replace" or name in REPLACED
    merged = {} if starts_anew else items[position]
    merge_into(merged, patch, field)
    items[here] = [merged]


# What the launch needs


def _contradictions(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """The fields that the template changed, and must not."""
    for label, value in before["metadata"]["labels"].items():
        if ((after.get("metadata") or {}).get("labels") or {}).get(label) != value:
            yield f"metadata.labels.{label}: the launch sets it"
    pod_before = before["spec"]
    pod = after.get("spec") or {}
    for name in FIXED_IN_POD:
        if pod.get(name) != pod_before.get(name):
            yield f"spec.{name}: the launch sets it"
    grace = "terminationGracePeriodSeconds"
    seconds = pod.get(grace)
    if not isinstance(seconds, int) or seconds < pod_before[grace]:
        yield f"spec.{grace}: the ranks need {pod_before[grace]} s to save; --grace sets their part"

    (container_before,) = pod_before["containers"]
    name = container_before["name"]
    where = f"spec.containers[{name}]"
    containers = [item for item in pod.get("containers") or [] if item.get("name") == name]
    if not containers:
        yield f"{where}: the launch needs it"
        return
    yield from _container_contradictions(container_before, containers[0], where)


def _container_contradictions(
    before: dict[str, Any], after: dict[str, Any], where: str
) -> Iterator[str]:
    """The same for the container that the launch has made."""
    for name in FIXED_IN_CONTAINER:
        if after.get(name) != before.get(name):
            hint = "; give --image" if name == "image" else ""
            yield f"{where}.{name}: the launch sets it{hint}"
    variables = {item["name"]: item for item in before["env"]}
    variables_after = {item["name"]: item for item in after.get("env") or []}
    for name in {**variables, **variables_after}:
        is_reserved = RESERVED.fullmatch(str(name))
        if is_reserved and variables.get(name) != variables_after.get(name):
            yield f"{where}.env[{name}]: the launch sets it"


# Writing


def yaml_text(documents: Sequence[Any]) -> str:
    """Objects as YAML, each text in quotes: nothing in it can be read as anything else."""
    import yaml

    class QuotingDumper(yaml.SafeDumper):  # type: ignore[misc]
        def ignore_aliases(self, data: Any) -> bool:
            return True

    QuotingDumper.add_representer(
        str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')
    )
    text: str = yaml.dump_all(documents, Dumper=QuotingDumper, sort_keys=False, width=sys.maxsize)
    return text

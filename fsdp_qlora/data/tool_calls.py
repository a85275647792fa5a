"""Normalize tools and tool calls to OpenAI's format, whatever framework wrote the example. chat.py
renders them."""

from __future__ import annotations

import ast
import contextlib
import json
from typing import Any

ARGUMENTS = ("arguments", "parameters", "args")  # names of a call's arguments in frameworks
OUTER = ("id", "type", "index")  # keys of a call that do not belong to its function


def read_value(text: str) -> Any:
    """Parse a text as JSON, perhaps encoded twice, or as a list or object printed by Python; else
    return the text itself."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(text)
        return read_value(value) if isinstance(value, str) else value
    if text.lstrip()[:1] in ("[", "{"):
        with contextlib.suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return json.loads(json.dumps(ast.literal_eval(text.strip())))  # tuples become lists
    return None if text.strip() == "None" else text


def read_list(values: Any, what: str) -> list[Any]:
    """Return a list of objects, each of which may be given as text; a single object becomes a list.
    """
    values = read_value(values) if isinstance(values, str) else values
    values = {dict: [values], type(None): []}.get(type(values), values)
    if not isinstance(values, list):
        raise ValueError(f"{what} is {type(values).__name__}, expected a list of objects")
    return [read_value(value) if isinstance(value, str) else value for value in values]


def openai_tools(tools: Any) -> list[dict[str, Any]]:
    """Return the tools of an example, each {"type": "function", "function": {"name": ..}}."""
    results = []
    for tool in read_list(tools, "tools"):
        function = tool.get("function", tool) if isinstance(tool, dict) else tool
        function = read_value(function) if isinstance(function, str) else function
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError("a tool must be an object with a name")
        outer = tool if "function" in tool else {}
        results.append({"type": "function", **outer, "function": function})
    return results


def openai_calls(calls: Any, as_text: bool) -> list[dict[str, Any]]:
    """Return the calls of a message, each {"type": "function", "function": {"name": ..,
    "arguments": ..}}; the arguments are an object, or JSON `as_text`."""
    results = []
    for call in read_list(calls, "tool_calls"):
        if not isinstance(call, dict):
            raise ValueError(f"a call of a tool is {type(call).__name__}, expected an object with a"
                             " name and arguments")
        outer = {key: call[key] for key in call if key in OUTER or "function" in call}
        function = outer.pop("function", {key: call[key] for key in call if key not in OUTER})
        function = read_value(function) if isinstance(function, str) else function
        if isinstance(function, str):  # only its name
            function = {"name": function}
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError("a call of a tool must be an object with a name and arguments")
        for key in outer.keys() & {*ARGUMENTS}:  # next to `function`, not in it
            function = {**function, f"{key} beside function": outer.pop(key)}
        results.append({"type": "function", **outer, "function": with_arguments(function, as_text)})
    return results


def with_arguments(function: dict[str, Any], as_text: bool) -> dict[str, Any]:
    """Return the function of a call with its arguments in the key "arguments", as an object, or as
    JSON `as_text`."""
    name = function["name"]
    keys = [key for key in function if key.removesuffix(" beside function") in ARGUMENTS]
    found = {key: function[key] for key in keys if function[key] is not None}
    full = {key: value for key, value in found.items() if value not in ("", {})}
    given = next(iter([*full.values(), *found.values()]), "")
    values = [read_value(value) if isinstance(value, str) else value for value in full.values()]
    if any(value != values[0] for value in values):
        raise ValueError(f"a call of {name} has {' and '.join(full)}, which differ")
    others = {key: value for key, value in function.items() if key not in keys}
    if given == "" and (unknown := others.keys() - {"name", "description"}):
        raise ValueError(f"a call of {name} has {', '.join(sorted(unknown))}, but no arguments")
    arguments = read_value(given.strip() or "{}") if isinstance(given, str) else given
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of a call of {name} are {type(arguments).__name__},"
                         " expected an object, or one as JSON text")
    if as_text:
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            if isinstance(json.loads(given), dict):
                return {**others, "arguments": given}  # unchanged, as in the example
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**others, "arguments": arguments}

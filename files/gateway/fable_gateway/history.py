"""Repair of the messages that a client sends back: what would break the chat template, and no more.

Messages that need nothing come out as the same object.
"""

from __future__ import annotations

from typing import Any

from fable_gateway.arguments import Json, as_object, is_strict_object, to_json
from fable_gateway.enginecalls import new_id

INVALID = "INVALID_JSON"
SYSTEM_ROLES = ("system", "developer")
REASONING_NAMES = ("reasoning", "reasoning_content")


def repaired(messages: list[Any]) -> list[Any]:
    """The messages as the engine can render them; the same list if nothing is wrong."""
    fixed = _linked([_message(message) for message in messages])
    fixed = _one_system_first(fixed)
    same = len(fixed) == len(messages) and all(
        new is old for new, old in zip(fixed, messages, strict=True)
    )
    return messages if same else fixed


def _message(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    message = _modern(message)
    changes: Json = {}
    role = message.get("role")
    if role == "assistant":
        changes = _reasoning(message)
        calls = message.get("tool_calls")
        if isinstance(calls, list) and calls:
            fixed = [_call(call) for call in calls]
            if any(new is not old for new, old in zip(fixed, calls, strict=True)):
                changes["tool_calls"] = fixed
    elif role == "tool":
        content = message.get("content")
        if content is None:
            changes["content"] = ""
        elif not isinstance(content, str | list) or (
            isinstance(content, list) and not all(isinstance(part, dict) for part in content)
        ):
            changes["content"] = to_json(content)
    elif role == "developer":
        changes["role"] = "system"
    result = message | changes if changes else message
    if role == "assistant" and "tool_calls" in message and not message["tool_calls"]:
        return {key: value for key, value in result.items() if key != "tool_calls"}
    return result


def _modern(message: Json) -> Json:
    """The calls and results of the API before tools, as tool calls; templates know no others."""
    call = message.get("function_call")
    if message.get("role") == "function":
        rest = {key: value for key, value in message.items() if key != "name"}
        return rest | {"role": "tool"}
    if message.get("role") == "assistant" and isinstance(call, dict):
        rest = {key: value for key, value in message.items() if key != "function_call"}
        return rest | {"tool_calls": [{"id": new_id(), "type": "function", "function": call}]}
    return message


def _reasoning(message: Json) -> Json:
    """Both names of the reasoning, for engines read one or the other."""
    texts = [message.get(name) for name in REASONING_NAMES]
    text = next((text for text in texts if isinstance(text, str) and text), None)
    if text is None:
        return {}
    return {name: text for name in REASONING_NAMES if not message.get(name)}


def _call(call: Any) -> Any:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call
    changes: Json = {}
    arguments = arguments_text(call["function"].get("arguments"))
    if arguments != call["function"].get("arguments"):
        changes["function"] = call["function"] | {"arguments": arguments}
    if call.get("type") != "function":
        changes["type"] = "function"
    if not isinstance(call.get("id"), str) or not call["id"]:
        changes["id"] = new_id()
    return call | changes if changes else call


def arguments_text(value: object) -> str:
    """Arguments as the JSON of an object; what is no object is wrapped whole, not lost."""
    if isinstance(value, str) and is_strict_object(value):
        return value
    found = as_object(value)
    try:
        return to_json({INVALID: value} if found is None else found)
    except (ValueError, RecursionError):
        return to_json({INVALID: str(value)})


def _linked(messages: list[Any]) -> list[Any]:
    """Results without a call's id get those of the calls before them, in order."""
    result: list[Any] = []
    open_ids: list[str] = []
    for message in messages:
        fixed = message
        if isinstance(message, dict):
            if message.get("role") == "assistant":
                calls = message.get("tool_calls")
                calls = calls if isinstance(calls, list) else []
                open_ids = [call["id"] for call in calls if isinstance(call, dict) and "id" in call]
            elif message.get("role") == "tool":
                identity = message.get("tool_call_id")
                if identity in open_ids:
                    open_ids.remove(identity)
                elif not identity and open_ids:
                    fixed = message | {"tool_call_id": open_ids.pop(0)}
        result.append(fixed)
    return result


def _one_system_first(messages: list[Any]) -> list[Any]:
    systems = [m for m in messages if isinstance(m, dict) and m.get("role") == "system"]
    if not systems or (len(systems) == 1 and messages[0] is systems[0]):
        return messages
    contents = [message.get("content") for message in systems]
    content: Any = "\n\n".join(text for text in contents if isinstance(text, str))
    if not all(isinstance(text, str) for text in contents):
        content = [part for value in contents for part in _content_parts(value)]
    others = [m for m in messages if not (isinstance(m, dict) and m.get("role") == "system")]
    return [systems[0] | {"content": content}, *others]


def _content_parts(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    return [{"type": "text", "text": value}] if isinstance(value, str) else []

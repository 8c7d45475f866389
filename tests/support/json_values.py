"""JSON values, to be changed at any place by tests of readers."""

from __future__ import annotations

from typing import Any


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in `value`."""
    found, todo = [], [value]
    while todo:
        node = todo.pop()
        for key, child in list(node.items() if isinstance(node, dict) else enumerate(node)):
            found.append((node, key))
            if isinstance(child, (dict, list)):
                todo.append(child)
    return found

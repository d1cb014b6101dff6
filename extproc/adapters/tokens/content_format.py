"""Does a chat template want a message's content as a string, or as a list of parts?

Engines find out by reading the template, and so do we, by vLLM's rule (0.32): it wants parts if it loops over
the content of a message. "A message" is a loop variable over `messages` or over a name assigned from it;
filters, tests and slices on the way do not matter. A loop over a macro's parameter counts if some call passes
a message's content for it; a loop outside any macro counts if it runs over a variable called `content`.
"""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import nodes

from extproc.adapters.tokens.engine_shape import ContentFormat


def content_format(template: nodes.Template) -> ContentFormat:
    """`"openai"` if the template iterates over content parts, else `"string"`."""
    conversations = _aliases(template, "messages")
    messages = {
        loop.target.name
        for loop in template.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name) and _name(loop.iter) in conversations
    }
    in_macros: set[int] = set()
    for macro in template.find_all(nodes.Macro):
        loops = list(macro.find_all(nodes.For))
        in_macros.update(id(loop) for loop in loops)
        parameters = _content_parameters(template, macro, messages)
        if any(isinstance(loop.iter, nodes.Name) and loop.iter.name in parameters for loop in loops):
            return "openai"
    for loop in template.find_all(nodes.For):
        if _is_content(loop.iter, messages):
            return "openai"
        if id(loop) not in in_macros and isinstance(loop.iter, nodes.Name) and loop.iter.name == "content":
            return "openai"
    return "string"


def _aliases(template: nodes.Template, name: str) -> set[str]:
    """`name` and every variable that is assigned from it, directly or through others."""
    found = {name}
    grown = True
    while grown:
        grown = False
        for assignment in template.find_all(nodes.Assign):
            target = assignment.target
            if (
                isinstance(target, nodes.Name)
                and target.name not in found
                and _name(assignment.node) in found
            ):
                found.add(target.name)
                grown = True
    return found


def _content_parameters(template: nodes.Template, macro: nodes.Macro, messages: set[str]) -> set[str]:
    names = [argument.name for argument in macro.args]
    return {
        name
        for call in template.find_all(nodes.Call)
        if isinstance(call.node, nodes.Name) and call.node.name == macro.name
        for name, argument in _bound(names, call)
        if _is_content(argument, messages)
    }


def _bound(names: list[str], call: nodes.Call) -> Iterator[tuple[str, nodes.Node]]:
    yield from zip(names, call.args, strict=False)
    yield from ((keyword.key, keyword.value) for keyword in call.kwargs if keyword.key in names)


def _bare(node: nodes.Node | None) -> nodes.Node | None:
    """The expression without the filters, tests and slices around it."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    return node


def _name(node: nodes.Node) -> str | None:
    bare = _bare(node)
    return bare.name if isinstance(bare, nodes.Name) and bare.ctx == "load" else None


def _is_content(node: nodes.Node, messages: set[str]) -> bool:
    bare = _bare(node)
    if isinstance(bare, nodes.Getattr):
        key: object = bare.attr
    elif isinstance(bare, nodes.Getitem) and isinstance(bare.arg, nodes.Const):
        key = bare.arg.value
    else:
        return False
    holder = bare.node
    return key == "content" and isinstance(holder, nodes.Name) and holder.name in messages

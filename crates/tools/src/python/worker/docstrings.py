"""Docstrings: the description of a function and of its parameters, in Google's, NumPy's or Sphinx' style."""

import inspect
import re

PARAMETERS = {
    "args",
    "arguments",
    "parameters",
    "params",
    "other parameters",
    "keyword args",
    "keyword arguments",
}
OTHERS = {
    "returns",
    "return",
    "yields",
    "yield",
    "raises",
    "raise",
    "except",
    "exceptions",
    "examples",
    "example",
    "notes",
    "note",
    "see also",
    "references",
    "warnings",
    "warning",
    "warns",
    "attributes",
    "todo",
    "methods",
}
SPHINX = re.compile(
    r"^[:@](?:param|parameter|arg|argument|key|keyword)\s+(?:[^:]*?\s)?\*{0,2}(\w+)\s*:\s*(.*)$"
)
SPHINX_OTHER = re.compile(
    r"^[:@](?:type|return|returns|rtype|raise|raises|except|var|ivar|cvar|meta|yields?)\b"
)
GOOGLE = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*(?:\([^)]*\)[^)]*)*\))?\s*:\s*(.*)$")
NUMPY = re.compile(r"^(\*{0,2}\w+(?:\s*,\s*\*{0,2}\w+)*)\s*(?::.*)?$")


def read(docstring):
    """The description, and those of parameters by name."""
    lines = inspect.cleandoc(docstring or "").splitlines()
    description, parameters, at = [], {}, 0
    begun = False
    while at < len(lines):
        line = lines[at]
        section = header(lines, at)
        if section is not None:
            begun = True
            name, body, underlined = section
            end = body
            while end < len(lines) and header(lines, end) is None and not is_field(lines[end]):
                if not underlined and lines[end].strip() and not lines[end].startswith((" ", "\t")):
                    break
                end += 1
            if name in PARAMETERS:
                parameters.update((numpy if underlined else google)(lines[body:end]))
            at = end
        elif is_field(line):
            begun = True
            found = SPHINX.match(line.strip())
            text, at = [found.group(2)] if found else [], at + 1
            while at < len(lines) and lines[at].startswith((" ", "\t")):
                text.append(lines[at].strip())
                at += 1
            if found:
                parameters[found.group(1)] = " ".join(filter(None, text))
        else:
            if not begun:
                description.append(line)
            at += 1
    return "\n".join(description).strip(), {name: text for name, text in parameters.items() if text}


def is_field(line):
    """Whether a line begins a field of Sphinx' style."""
    return bool(SPHINX.match(line.strip()) or SPHINX_OTHER.match(line.strip()))


def header(lines, at):
    """Name of the section that begins at a line, where its body begins, and whether it is underlined."""
    line = lines[at]
    name = line.strip().rstrip(":").lower()
    if line.startswith((" ", "\t")) or name not in PARAMETERS | OTHERS:
        return None
    below = lines[at + 1].strip() if at + 1 < len(lines) else ""
    if len(below) >= 3 and set(below) <= {"-"}:
        return name, at + 2, True
    return (name, at + 1, False) if line.rstrip().endswith(":") else None


def google(lines):
    """Parameters, each on a line, with lines further in that go on."""
    return entries(lines, GOOGLE, lambda found: ([found.group(1)], found.group(2)))


def numpy(lines):
    """Parameters, each with its type on a line, and its description further in."""
    return entries(lines, NUMPY, lambda found: ([name.strip(" *") for name in found.group(1).split(",")], ""))


def entries(lines, pattern, take):
    """What stands after names that are as little indented as the first one."""
    depth, names, found = None, [], {}
    for line in lines:
        text = line.strip()
        if not text:
            continue
        indent = len(line) - len(line.lstrip())
        depth = indent if depth is None else depth
        begins = pattern.match(text) if indent <= depth else None
        if begins:
            names, first = take(begins)
            for name in names:
                found[name] = [first] if first else []
        else:
            for name in names:
                found[name].append(text)
    return {name: " ".join(texts) for name, texts in found.items()}

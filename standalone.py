#!/usr/bin/env python3
"""Build each script as one file that needs no file beside it.

    python standalone.py --out dist

A built file holds the script first and below it the modules of fsdp_qlora/ that it needs, each
after those it imports from. All share one namespace: a name with two meanings fails the build, and
the script may use names of modules only inside functions.
"""

import argparse
import ast
import graphlib
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent
SCRIPTS = "train_fsdp_qlora.py", "merge_adapters.py"
RULE = "# " + "-" * 96


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("dist"), help="folder of the built files")
    out = parser.parse_args().out
    texts = {script: assemble(script) for script in SCRIPTS}
    for script, text in texts.items():
        check_it_starts(script, text)
    out.mkdir(parents=True, exist_ok=True)
    for script, text in texts.items():
        (out / script).write_text(text)
        print(f"{out / script}: {text.count(chr(10)):,} lines")


def assemble(script):
    """The text of a script and of all modules that it needs as one file."""
    graph, waiting = {}, [script]
    while waiting:
        path = waiting.pop()
        if path not in graph:
            graph[path] = needed_modules(path)
            waiting += graph[path]
    try:
        *modules, _ = graphlib.TopologicalSorter(graph).static_order()
    except graphlib.CycleError as e:
        sys.exit("standalone.py: the imports form a cycle: " + " imports ".join(e.args[1][::-1]))
    sources = {path: cut(path) for path in (script, *modules)}
    check_names(sources)
    docstring, _, code, end, *_ = sources[script]
    imports = dict.fromkeys(text for _, head, *_ in sources.values() for text in head)
    imports.pop("from typing import TYPE_CHECKING", None)
    imports = sorted(imports, key=lambda text: "__future__" not in text)  # which comes first
    parts = [
        f"#!/usr/bin/env python3\n# {script} as one file, of commit {commit()}: the script, and"
        " below it its modules.\n# Made by `make standalone`: to send a change back, edit the"
        f" repository's files.\n{docstring}", "\n".join([*imports, *typed_names(sources)]), code]
    for path in modules:
        about = "\n".join(f"# {line}".rstrip() for line in sources[path][0].splitlines())
        parts.append(f"{RULE}\n# {path}\n#\n{about}\n{RULE}\n\n{sources[path][2]}")
    return "\n\n\n".join([*parts, end]) + "\n"


def typed_names(sources):
    """Lines that give a meaning to names that only annotations use, of modules that the file does
    not need."""
    known = {name for _, _, _, _, names, _ in sources.values() for name in names}
    missing = sorted({name for *_, typed in sources.values() for name in typed} - known)
    return [f"{' = '.join(missing)} = object"] if missing else []


def needed_modules(path):
    """The paths of the modules that a file imports from."""
    return [f"{node.module.replace('.', '/')}.py" for node in ast.parse(read(path)).body
            if isinstance(node, ast.ImportFrom) and node.module.startswith("fsdp_qlora.")]


def cut(path):
    """A file as (docstring, imports and what stands between them, code, block of __main__,
    {name at its top level: what it means}, names for annotations alone); local imports are left
    out."""
    text, lines = read(path), read(path).splitlines()
    tree = ast.parse(text)
    docstring, head, code, end, names, typed, start = "", [], [], "", {}, [], 0
    last_import = max((i for i, node in enumerate(tree.body) if is_import(node)), default=0)
    for i, node in enumerate(tree.body):
        part = "\n".join(lines[start : node.end_lineno]).strip("\n")  # with the comments above
        start = node.end_lineno
        if i == 0:
            docstring = part[part.index('"""') :] if path in SCRIPTS else node.value.value.strip()
        elif i <= last_import:
            if for_types(node):
                typed += [alias.name for block in node.body for alias in block.names]
            elif not getattr(node, "module", "").startswith("fsdp_qlora"):
                head += one_by_one(node) if hasattr(node, "names") else [part]
                names |= meanings(node, path)
        elif isinstance(node, ast.If) and "__main__" in part:
            end = part
        else:
            code.append("\n".join(lines[tree.body[i - 1].end_lineno : node.end_lineno]))
            names |= meanings(node, path)
    return docstring, head, "\n".join(code).strip("\n"), end, names, typed


def one_by_one(node):
    """An import statement as one line for each name, so that a name is imported once."""
    start = f"from {node.module} " if isinstance(node, ast.ImportFrom) else ""
    return [f"{start}import {ast.unparse(alias)}" for alias in node.names]


def meanings(node, path):
    """{name that a top-level statement binds: where it is defined, or which import it is}."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name: f"{path}:{node.lineno}"}
    if isinstance(node, ast.Import | ast.ImportFrom):
        origin = f"import of {getattr(node, 'module', '')}"
        return {(alias.asname or alias.name).split(".")[0]: origin for alias in node.names}
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return {node.id: f"{path}:{node.lineno}"}
    if isinstance(node, ast.ListComp | ast.DictComp | ast.GeneratorExp | ast.Lambda):
        return {}  # its names are its own
    found = {}
    for child in node.body if is_import(node) else ast.iter_child_nodes(node):
        found |= meanings(child, path)
    return found


def check_names(sources):
    """Fail where a name has two meanings, or a local import would be left in the file."""
    known = {}
    for path, (_, _, code, _, names, _) in sources.items():
        for name, meaning in names.items():
            if known.setdefault(name, meaning) != meaning:
                sys.exit(f"standalone.py: {name} is defined twice: {known[name]} and {meaning}")
        if "from fsdp_qlora" in code or "import fsdp_qlora" in code:
            sys.exit(f"standalone.py: {path}: imports of modules stand at the top of the file")


def is_import(node):
    return isinstance(node, ast.Import | ast.ImportFrom) or for_types(node) or (
        isinstance(node, ast.Try) and all(map(is_import, node.body)))


def for_types(node):
    """Whether a statement is `if TYPE_CHECKING:`, whose imports are for annotations alone. In one
    file these names are there anyway."""
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def read(path):
    return (ROOT / path).read_text()


def commit():
    """git's name of the commit, with "-dirty" where files differ from it; else "unknown"."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def check_it_starts(script, text):
    """Fail unless the file, alone in an empty folder, answers --help."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / script).write_text(text)
        done = subprocess.run([sys.executable, "-I", script, "--help"], cwd=folder,
                              capture_output=True, text=True)
    if done.returncode:
        why = done.stderr.strip().splitlines()[-1]
        sys.exit(f"standalone.py: {script} as one file does not start: {why} (the script may use"
                 " names of modules only inside functions)")


if __name__ == "__main__":
    main()

"""The modules of the package, for tests that replace a function wherever it is used.

A module has the names that it imports, so that a fault in one function must be put into each module
that calls it.
"""

import os
import sys
import types
from pathlib import Path

# what the check at start does not call
NOT_CHECKED = ("train_", "fsdp_qlora.run", "fsdp_qlora.planner", "fsdp_qlora.layer_costs",
               "fsdp_qlora.evaluation.document_losses", "fsdp_qlora.evaluation.global_loss_inputs",
               "fsdp_qlora.evaluation.ref_logps")  # fmt: skip


def modules():
    names = [name for name in list(sys.modules) if name.startswith(("fsdp_qlora.", "train_fsdp_"))]
    return [sys.modules[name] for name in sorted(["fsdp_qlora", *names]) if sys.modules.get(name)]


def owners(name):
    """The modules that have `name`, which may be that of a module, too, as document_losses is."""
    found = [module for module in modules()
             if not isinstance(vars(module).get(name, module), types.ModuleType)]
    assert found, f"no module of the package has {name}"
    return found


def get(name):
    """What is called `name`, wherever that is defined."""
    return vars(owners(name)[0])[name]


def replace(name, new):
    """Put `new` in the place of what is called `name`, in all modules; returns what was there."""
    old = get(name)
    for module in owners(name):
        setattr(module, name, new)
    return old


def wrap(name, around):
    """Put around(what is called `name`) in its place."""
    replace(name, around(get(name)))


def snapshot():
    """The names of all modules; restore() puts them back."""
    return {module: vars(module).copy() for module in modules()}


def restore(names):
    for module, values in names.items():
        vars(module).update(values)


def check_each_model_once():
    """This process's runs leave out a check at start that one of the session has passed, unless a
    test has replaced something that computes: nothing else comes into it but the shrunk
    configuration, and it takes as long as a step or two."""
    import train_fsdp_qlora
    from fsdp_qlora.files import json_digest
    from fsdp_qlora.pretrained.shrunk_config import shrunk_config

    check = train_fsdp_qlora.compare_with_transformers
    code = [(module, name, value) for module, names in snapshot().items()
            if not module.__name__.startswith(NOT_CHECKED)
            for name, value in names.items() if not isinstance(value, int)]  # or how much at once

    def check_once(model_config, name):
        is_replaced = any(vars(module)[key] is not value for module, key, value in code)
        try:
            shrunk = shrunk_config(model_config)
            shrunk.name_or_path = ""  # where its files lie
            shrunk = shrunk.to_json_string(use_diff=False)
        except Exception:
            is_replaced = True  # the check tells what is wrong
        if is_replaced:
            return check(model_config, name)
        passed = Path(os.environ["PASSED_CHECKS"], json_digest(shrunk))
        if not passed.exists():
            check(model_config, name)
            passed.touch()

    train_fsdp_qlora.compare_with_transformers = check_once


def parse_config(argv):
    """The Config of a command line, or what the parser raises."""
    return get("parse_flags")(argv)

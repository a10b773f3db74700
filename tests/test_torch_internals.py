"""Promise: private names of torch are used in one module, and one that torch drops fails here by name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import tekfac
from tekfac.common import torch_internals as internals

SOURCE = Path(tekfac.__file__).parent
PRIVATE = re.compile(
    r"torch\._(?!_version__)\w+"  # torch._C, torch._foreach_...
    r"|\._(?:version|parameters|modules|buffers|orig_mod|compiled_call_impl|sequence_nr|C)\b"
    r"|_get_fsdp_state|_fsdp_param_group|_unsharded_param|_torchdynamo\w*|\"_orig_mod|\w+Backward0"
)


def without_prose(path: Path) -> str:
    """The code of a file, without comments and docstrings."""
    text = re.sub(r'""".*?"""', "", path.read_text(), flags=re.DOTALL)
    return re.sub(r"#.*", "", text)


def test_no_other_module_names_anything_private() -> None:
    found = {
        str(path.relative_to(SOURCE)): names
        for path in SOURCE.rglob("*.py")
        if path.name != "torch_internals.py" and (names := PRIVATE.findall(without_prose(path)))
    }
    assert found == {}


@pytest.mark.parametrize(
    "name",
    [
        "_C._functorch.peek_interpreter_stack",
        "_C._current_autograd_node",
        "_C._will_engine_execute_node",
        "_foreach_mul_",
        "_foreach_add_",
        "_foreach_copy_",
        "_foreach_norm",
        "_foreach_mul",
        "_foreach_lerp_",
        "_foreach_clamp_min_",
        "_foreach_add",
        "_foreach_sqrt_",
        "_foreach_div",
    ],
)
def test_torch_has(name: str) -> None:
    found = torch
    for part in name.split("."):
        assert hasattr(found, part), f"this torch has no torch.{name}: {internals.__name__} needs another way"
        found = getattr(found, part)


def test_torch_has_sequence_numbers_that_grow() -> None:
    x = torch.ones(2, requires_grad=True)
    first = x * 2
    second = first + 1
    assert internals.sequence_number(second.grad_fn) > internals.sequence_number(first.grad_fn)


def test_torch_counts_changes_in_place() -> None:
    x = torch.zeros(2)
    before = internals.version_of(x)
    x.add_(1)
    assert internals.version_of(x) == before + 1


def test_a_change_of_precision_is_told_from_another_node() -> None:
    x = torch.ones(2, requires_grad=True)
    assert internals.is_change_of_precision(x.to(torch.float64).grad_fn)
    assert internals.is_change_of_precision(x.bfloat16().grad_fn)
    assert not internals.is_change_of_precision((x * 2).grad_fn)
    assert not internals.is_change_of_precision(x.reshape(2, 1).grad_fn)


def test_torch_func_is_noticed() -> None:
    seen = []
    torch.func.grad(lambda x: (seen.append(internals.is_inside_torch_func()), x.sum())[1])(torch.ones(2))
    assert seen == [True]
    assert not internals.is_inside_torch_func()


def test_the_running_node_and_what_will_run_are_known_inside_of_a_backward_pass_alone() -> None:
    x = torch.ones(2, requires_grad=True)
    y = torch.ones(2, requires_grad=True)
    out = x * 2
    edges = [torch.autograd.graph.get_gradient_edge(tensor).node for tensor in (x, y)]
    seen: list[object] = []

    def hook(gradient: torch.Tensor) -> None:
        seen.append(internals.running_node() is out.grad_fn)
        seen.extend(internals.will_run(node) for node in edges)

    out.register_hook(hook)  # type: ignore[no-untyped-call]
    out.sum().backward()
    assert seen == [True, True, False]
    assert internals.running_node() is None


def test_a_change_of_stance_can_be_undone() -> None:
    change = internals.change_stance("force_eager")
    assert change.now.stance == "force_eager"
    change.undo()
    again = internals.change_stance("force_eager")
    assert again.before == change.before
    again.undo()


def test_a_compiled_model_is_unwrapped() -> None:
    model = nn.Linear(2, 2)
    compiled = torch.compile(model, backend="eager")
    assert internals.without_compiler(compiled) is model  # type: ignore[arg-type]
    assert internals.without_compiler(model) is model
    assert all(name.startswith(internals.COMPILED_PREFIX) for name, _ in compiled.named_parameters())  # type: ignore[attr-defined]


def test_the_attribute_of_what_is_never_compiled_is_that_of_torch() -> None:
    ours = internals.never_compiled(lambda: None)
    theirs = torch.compiler.disable(lambda: None)  # type: ignore[no-untyped-call]
    assert ours._torchdynamo_disable is theirs._torchdynamo_disable is True


def test_many_tensors_at_a_time_are_those_one_by_one() -> None:
    tensors = [torch.tensor([1.0, -3.0]), torch.tensor([[2.0]])]
    internals.multiply_each(tensors, 2.0)
    internals.add_to_each(tensors, [torch.ones(2), torch.ones(1, 1)], -0.5)
    assert [t.flatten().tolist() for t in tensors] == [[1.5, -6.5], [3.5]]
    copies = [torch.zeros(2), torch.zeros(1, 1, dtype=torch.float64)]
    internals.copy_each(copies, tensors)
    assert [t.flatten().tolist() for t in copies] == [[1.5, -6.5], [3.5]]


def test_the_fisher_of_a_model_that_is_not_compiled_does_not_import_the_compiler() -> None:
    """That takes seconds. torch's own optimizers import it, and so do ours."""
    data = "[(torch.ones(4, 2), torch.zeros(4).long())]"
    code = (
        f"import sys, torch, tekfac; tekfac.fisher.estimate(torch.nn.Linear(2, 3), {data}); "
        f"print({internals.COMPILER!r} in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "False"

"""Replay by substitution: each planted fault is named where it is, what follows is inherited."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tracediff.bisection import bisect, diff
from tracediff.cli import main
from tracediff.errors import UsageError
from tracediff.session import record_script
from tracediff.substitution import replay
from tracediff.trace import Trace
from tracediff.verdict import Verdict

PYTORCH = """
import sys
import numpy as np, torch, transformers
folder, faults = sys.argv[1], sys.argv[2:]
torch.manual_seed(0)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
    vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2, rms_norm_eps=1e-5,
    attn_implementation="eager" if "eager" in faults else "sdpa"))
weights = {name: p.detach().numpy() for name, p in model.state_dict().items()}
np.savez(f"{folder}/weights.npz", **weights)
layers = model.model.layers
if "module" in faults:
    layers[0].mlp.down_proj.register_forward_hook(lambda module, given, out: out * 1.01)
if "glue" in faults:
    layers[1].self_attn.scaling *= 1.05
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = np.random.default_rng(0).integers(0, 50, (2, 2, 8))
for ids in torch.from_numpy(data):
    logits = model(input_ids=ids[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 50), ids[:, 1:].reshape(-1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert not np.isnan(loss.item())
"""

MLX = """
import sys
import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim, numpy as np
from mlx_lm.models.llama import Model, ModelArgs

class Linear(nn.Linear):
    def __call__(self, x):
        return super().__call__(x) * 1.01

def main(folder, faults):  # in globals, MLX would keep the optimizer alive beyond the script
    model = Model(ModelArgs(
        model_type="llama", hidden_size=16, num_hidden_layers=3, intermediate_size=24,
        num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5, vocab_size=50,
        tie_word_embeddings=False))
    model.load_weights(list(mx.load(f"{folder}/weights.npz").items()))
    layers = model.model.layers
    if "module" in faults:
        layers[0].mlp.down_proj.__class__ = Linear
    if "glue" in faults:
        layers[1].self_attn.scale *= 1.05
    optimizer = optim.AdamW(1e-3, betas=[0.9, 0.999], bias_correction=True)
    step = nn.value_and_grad(model, lambda ids: nn.losses.cross_entropy(
        model(ids[:, :-1]), ids[:, 1:], reduction="mean"))
    for ids in mx.array(np.random.default_rng(0).integers(0, 50, (2, 2, 8))):
        loss, grads = step(ids)
        optimizer.update(model, grads)
        mx.eval(model.parameters(), optimizer.state)
        assert not np.isnan(loss.item())

main(sys.argv[1], sys.argv[2:])
"""

MODULE = "0/forward/model.layers.0.mlp.down_proj#0:out"
GLUE = "0/forward/model.layers.1.self_attn.o_proj#0:in"
BETWEEN = (
    "0/forward/model.layers.0#0:out",
    "0/forward/model.layers.1.input_layernorm#0:out",
    "0/forward/model.layers.1.self_attn.q_proj#0:out",
    "0/forward/model.layers.2.mlp.down_proj#0:in",
    "0/forward/root#0:out",
)
"""Sites that a fault reaches but that add nothing to it."""


class Jobs:
    """Records, replays and bisects the two scripts; recordings are made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, script in (("pytorch", PYTORCH), ("mlx", MLX)):
            (folder / f"{name}.py").write_text(script, encoding="utf-8")

    def script(self, stack: str) -> str:
        return str(self.folder / f"{stack}.py")

    def recorded(self, stack: str, *faults: str) -> Path:
        path = self.folder / f"{'-'.join((stack, *faults))}.zarr"
        if not path.exists():
            gc.collect()  # an optimizer of an earlier run would count as existing
            arguments = [str(self.folder), *faults]
            record_script(self.script(stack), arguments, output=path, stack=stack)
        return path

    def replayed(self, baseline: Path, stack: str, *faults: str) -> Path:
        target = self.recorded(stack, *faults)
        path = self.folder / f"{target.stem}-with-{baseline.stem}.zarr"
        if not path.exists():
            gc.collect()
            arguments = [str(self.folder), *faults]
            replay(self.script(stack), arguments, target=target, baseline=baseline, output=path)
        return path

    def bisected(self, baseline: Path, stack: str, *faults: str) -> Verdict:
        out = self.replayed(baseline, stack, *faults)
        return bisect(baseline, self.recorded(stack, *faults), replayed=out)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    made = Jobs(tmp_path_factory.mktemp("replay"))
    made.recorded("pytorch")
    return made


STACKS = pytest.mark.parametrize("stack", ["pytorch", "mlx"])


@STACKS
def test_two_independent_faults_are_both_named_and_nothing_between(jobs: Jobs, stack: str) -> None:
    baseline = jobs.recorded("pytorch")
    verdict = jobs.bisected(baseline, stack, "module", "glue")
    assert verdict.first is not None
    assert (verdict.first.site, verdict.first.origin) == (MODULE, "introduced")
    assert verdict.replayed is not None
    assert verdict.replayed.introduced == (MODULE, GLUE)
    assert GLUE in {other.site for other in verdict.also}
    marks = {row.site: row.mark for row in diff(baseline, jobs.recorded(stack, "module", "glue"))}
    assert {marks[site] for site in BETWEEN} == {"diverged"}  # they do differ, by inheritance
    assert verdict.replayed.inherited > 20


@STACKS
def test_a_fault_that_belongs_to_no_module_is_named_at_what_is_computed_from_it(
    jobs: Jobs, stack: str
) -> None:
    verdict = jobs.bisected(jobs.recorded("pytorch"), stack, "glue")
    assert verdict.replayed is not None
    assert verdict.replayed.introduced == (GLUE,)
    assert verdict.first is not None
    assert verdict.first.site == GLUE


def test_the_same_on_mlx_alone(jobs: Jobs) -> None:
    verdict = jobs.bisected(jobs.recorded("mlx"), "mlx", "module", "glue")
    assert verdict.replayed is not None
    assert verdict.replayed.introduced == (MODULE, GLUE)


@pytest.mark.parametrize(
    ("baseline", "target"),
    [
        (("pytorch",), ("mlx",)),
        (("pytorch",), ("pytorch", "eager")),
        (("mlx",), ("pytorch",)),
    ],
    ids=" ".join,
)
def test_a_clean_twin_introduces_nothing(
    jobs: Jobs, baseline: tuple[str, ...], target: tuple[str, ...]
) -> None:
    verdict = jobs.bisected(jobs.recorded(*baseline), *target)
    assert (verdict.outcome, verdict.first) == ("equivalent", None), verdict.reason
    assert verdict.replayed is not None
    assert (verdict.replayed.introduced, verdict.replayed.inherited) == ((), 0)
    assert verdict.replayed.decided > 100
    forward = next(stage for stage in verdict.stages if stage.stage == "forward")
    assert forward.differing > 0  # the twin is a genuine variation


@STACKS
def test_a_run_replayed_with_itself_is_the_same_run(jobs: Jobs, stack: str) -> None:
    """Giving each module what it had anyway changes no bit, but for the order in which gradients
    of a value that is used several times are added up."""
    own = jobs.recorded(stack)
    out = jobs.replayed(own, stack)
    with Trace(own) as before, Trace(out) as after:
        expected, found = (
            {str(e.site): e.digest for e in t.events(0) if e.site.phase in ("forward", "loss")}
            for t in (before, after)
        )
    given = {site for site in found if site.endswith(":given")}
    assert len(given) > 30
    assert found.keys() - given == expected.keys()
    assert {site for site in expected if found[site] != expected[site]} == set()
    assert bisect(own, out).outcome == "equivalent"


@STACKS
def test_a_module_runs_on_what_it_is_given_and_records_what_it_computed(
    jobs: Jobs, stack: str
) -> None:
    """Checked by hand: the output is the weight times the baseline's input, not its own."""
    baseline, name = jobs.recorded("pytorch"), "model.layers.1.self_attn.o_proj"
    out = jobs.replayed(baseline, stack, "module", "glue")
    with Trace(baseline) as a, Trace(jobs.recorded(stack, "module", "glue")) as b, Trace(out) as r:
        weight = a.array(a.find(f"0/loading/{name}.weight:param")).astype(np.float64)
        given, own, computed = (
            t.array(t.find(f"0/forward/{name}#0:in")).astype(np.float64) for t in (a, b, r)
        )
        output = r.array(r.find(f"0/forward/{name}#0:out"))
        assert r.find(f"0/forward/{name}#0:given").value == ["in"]
    assert np.abs(given - own).max() > 1e-3
    assert np.abs(given - computed).max() > 1e-3
    np.testing.assert_allclose(output, given @ weight.T, rtol=1e-4, atol=1e-5)


def test_the_command_line_and_the_manifest(jobs: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    baseline, target = jobs.recorded("pytorch"), jobs.recorded("mlx", "glue")
    out = jobs.folder / "cli.zarr"
    gc.collect()
    options = [str(target), "--with", str(baseline), "-o", str(out), "--"]
    assert main(["replay", *options, jobs.script("mlx"), str(jobs.folder), "glue"]) == 0
    with Trace(out) as trace:
        setting = trace.run.settings["replay"]
        assert trace.run.stack == "mlx"
    assert (setting["of"]["stack"], setting["with"]["stack"]) == ("mlx", "pytorch")
    assert setting["steps"] == [0, 1]
    capsys.readouterr()
    code = main(["bisect", str(baseline), str(target), "--replayed", str(out), "--json", "-"])
    found = json.loads(capsys.readouterr().out)
    assert (code, found["replayed"]["introduced"]) == (1, [GLUE])
    assert main(["bisect", str(baseline), str(target), "--replayed", str(out)]) == 1
    assert "By replay" in capsys.readouterr().out


REFUSED: list[tuple[str, Callable[[Jobs], object]]] = [
    (
        "is no replay",
        lambda jobs: bisect(
            jobs.recorded("pytorch"), jobs.recorded("mlx"), replayed=jobs.recorded("mlx")
        ),
    ),
    (
        "of another baseline",
        lambda jobs: bisect(
            jobs.recorded("mlx"),
            jobs.recorded("mlx"),
            replayed=jobs.replayed(jobs.recorded("pytorch"), "mlx"),
        ),
    ),
    (
        "is not what was recorded",
        lambda jobs: replay(
            jobs.script("pytorch"),
            [],
            target=jobs.recorded("mlx"),
            baseline=jobs.recorded("pytorch"),
            output=jobs.folder / "never.zarr",
        ),
    ),
]


@pytest.mark.parametrize(("message", "attempt"), REFUSED, ids=[r[0] for r in REFUSED])
def test_what_does_not_belong_together_is_refused(
    jobs: Jobs, message: str, attempt: Callable[[Jobs], object]
) -> None:
    with pytest.raises(UsageError, match=message):
        attempt(jobs)
    assert not (jobs.folder / "never.zarr").exists()

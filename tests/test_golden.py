"""The committed traces: read by this release as by the one that wrote them, without a framework."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tracediff.bisection import bisect
from tracediff.trace import Trace, verify

TRACES = Path(__file__).resolve().parents[1] / "traces"
CLEAN, DRIFTED = TRACES / "clean.zarr", TRACES / "drifted.zarr"


@pytest.mark.parametrize("path", [CLEAN, DRIFTED], ids=["clean", "drifted"])
def test_every_byte_is_sound(path: Path) -> None:
    found = verify(path)
    assert found.sound
    assert not found.cut_off


def test_the_rotary_base_is_found() -> None:
    verdict = bisect(CLEAN, DRIFTED)
    assert verdict.exit_code == 1
    assert verdict.first is not None
    assert verdict.first.site == "0/forward/model.layers.0.self_attn.rope#0:out"
    assert ("config.rope_theta", 100000.0, 10000) in verdict.first.settings


def test_the_rotation_recorded_is_that_of_the_base_in_its_configuration() -> None:
    # RoFormer (Su et al., 2021), equation 34, halves paired as in Llama, worked out in float64.
    for path, base in ((CLEAN, 1e5), (DRIFTED, 1e4)):
        with Trace(path) as trace:
            site = "0/forward/model.layers.0.self_attn.rope#0:{}"
            x = trace.array(trace.find(site.format("in"))).astype(np.float64)
            y = trace.array(trace.find(site.format("out")))
        half = x.shape[-1] // 2
        angle = np.arange(x.shape[-2])[:, None] * base ** (-np.arange(half) / half)
        first, second = x[..., :half], x[..., half:]
        expected = np.concatenate(
            [
                first * np.cos(angle) - second * np.sin(angle),
                second * np.cos(angle) + first * np.sin(angle),
            ],
            axis=-1,
        )
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-6)


def test_a_core_only_install_bisects_them() -> None:
    """No framework can be imported, as on a machine that has none."""
    program = (
        "import sys\n"
        "for name in ('torch', 'mlx', 'transformers', 'peft'): sys.modules[name] = None\n"
        "from tracediff.cli import main\n"
        f"sys.exit(main(['bisect', {str(CLEAN)!r}, {str(DRIFTED)!r}]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "rope_theta" in done.stdout

"""What a case is, and how cases are written down."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product

from benchmarks.faults.job import Job
from benchmarks.faults.plants import Plant

PAIRS = {
    "tt": ("pytorch", "pytorch"),
    "tm": ("pytorch", "mlx"),
    "mt": ("mlx", "pytorch"),
    "mm": ("mlx", "mlx"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One pair of runs and the verdict that is right for it.

    Attributes:
        expect: Patterns `stage/path:port` of the first divergent site, any of which is right;
            empty for a clean twin.
        step: Step of the first divergence.
        plant: Applied to the job of `side`; for a twin, the variation.
        common: Applied to both jobs.
        side: `target`, or `baseline` where the fault is planted into the first run.
        same: Twin that is meant to be bit-identical.
        source: Entry of the fault catalogue, or "".
    """

    name: str
    pair: str
    family: str
    dtype: str
    plant: Plant
    expect: tuple[str, ...] = ()
    step: int = 0
    common: Plant | None = None
    side: str = "target"
    same: bool = False
    source: str = ""

    @property
    def id(self) -> str:
        side = "" if self.side == "target" else "-baseline"
        return f"{self.name}-{self.pair}{side}-{self.family}-{self.dtype}"

    @property
    def stage(self) -> str:
        return self.expect[0].partition("/")[0] if self.expect else "twin"

    def job(self, side: str, *, planted: bool = True) -> Job:
        """The job of a side, with the fault or variation if it is that side's."""
        stack = PAIRS[self.pair][side == "target"]
        job = Job(stack=stack, family=self.family, dtype=self.dtype)
        if self.common:
            self.common(job)
        job.trained = dict(job.config)
        if planted and side == self.side:
            self.plant(job)
        return job

    def located(self, stage: str, path: str, port: str) -> bool:
        site = f"{stage}/{path}:{port}"
        return any(fnmatchcase(site, pattern.replace("[", "[[]")) for pattern in self.expect)


class Registry:
    """Cases in the order in which they are written down."""

    def __init__(self) -> None:
        self.cases: list[Case] = []

    def fault(
        self,
        name: str,
        expect: str | dict[str, str],
        plant: Plant,
        *,
        pairs: str = "tt tm",
        families: str = "llama",
        dtypes: str = "float32",
        step: int = 0,
        common: Plant | None = None,
        side: str = "target",
        source: str = "",
    ) -> None:
        """Adds a fault for every pair of stacks, family and dtype.

        Args:
            expect: Patterns separated by blanks, for all pairs or by pair.
        """
        for pair, family, dtype in product(pairs.split(), families.split(), dtypes.split()):
            patterns = expect if isinstance(expect, str) else expect[pair]
            self.cases.append(
                Case(
                    name=name,
                    pair=pair,
                    family=family,
                    dtype=dtype,
                    plant=plant,
                    expect=tuple(patterns.split()),
                    step=step,
                    common=common,
                    side=side,
                    source=source,
                )
            )

    def twin(
        self,
        name: str,
        plant: Plant = lambda job: None,
        *,
        pairs: str = "tt",
        families: str = "llama",
        dtypes: str = "float32",
        common: Plant | None = None,
        same: bool = False,
    ) -> None:
        """Adds a variation that must stay silent, for every pair of stacks, family and dtype."""
        for pair, family, dtype in product(pairs.split(), families.split(), dtypes.split()):
            if family == "qwen3_moe" and dtype == "bfloat16" and "m" in pair:
                continue  # MLX's GatherMM runs in float32 only on the CPU
            self.cases.append(
                Case(
                    name=name,
                    pair=pair,
                    family=family,
                    dtype=dtype,
                    plant=plant,
                    common=common,
                    same=same,
                )
            )

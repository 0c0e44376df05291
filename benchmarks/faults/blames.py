"""Who is to be blamed for each planted fault, and why: written down before it is measured.

A fault is **decidable** where one side departs from what it was itself given or told: its
checkpoint, its samples, its inputs and parameters, its gradients and optimizer state. That side is
then the right answer, and naming nobody is a miss. Where a plant only changes what is asked of a
side (another learning rate, another template, other data), each side does what it was told and no
trace can say which was meant: naming nobody is then the right answer, and naming a side is wrong.
In doubt a fault is decidable.
"""

from __future__ import annotations

from typing import Final

ASKED: Final = {
    "template without end of turn": "another chat template was given",
    "template drops the system message": "another chat template was given",
    "truncated too short": "another maximum length was given",
    "prompt trained as well": "the prompt was chosen to be trained on",
    "prompt trained as well, labels seen by the loss only": "the prompt was chosen to be trained "
    "on",
    "padded on the left": "the other side to pad was chosen; the mask says so",
    "batches in another order": "other data was given at this step",
    "one sample twice in a batch": "other data was given at this step",
    "another seed, dropout active": "another seed was set",
    "one more draw before training": "the generator was drawn from; no state of it is the right "
    "one",
    "generator reseeded after a step": "another seed was set",
    "learning rate times 1.1, other state of an idle generator": "another learning rate was set",
    "adapter scaled by alpha": "another alpha was set",
    "rank-stabilised adapter": "rank-stabilised scaling was asked for",
    "dropout rate 0.3": "another rate was set",
    "dropout off": "another rate was set",
    "label smoothing": "label smoothing was asked for",
    "learning rate times 1.1": "another learning rate was set",
    "epsilon of Adam 1e-5": "another epsilon was set",
    "second beta 0.95": "another beta was set",
    "weight decay off": "another weight decay was set",
    "bias correction off": "bias correction was switched off",
    "Adam with coupled weight decay": "another optimizer was chosen",
    "schedule one step early": "another learning rate was set",
    "schedule wrong from the second step on": "another learning rate was set",
    "no clipping": "clipping was not asked for",
    "clipped to another norm": "another norm was set",
    "each gradient clipped by itself": "clipping was asked for parameter by parameter",
    "one parameter is not updated": "the optimizer was not given the parameter",
    "norms without weight decay": "another weight decay was set",
    "SGD without momentum": "another momentum was set",
    "one step more": "another number of steps was asked for",
    "other held-out batch": "other data was given to the evaluation",
}
"""Faults whose right blame is `undecided`, and what was asked of the planted side."""

OF_STAGE: Final = {
    "rendering": "the text, IDs, labels or mask are not those of the side's own samples",
    "loading": "the parameter is not the checkpoint's, or the buffer not the configuration's",
    "forward": "the output is not that of the side's own inputs, parameters and settings",
    "loss": "the loss is not the mean cross-entropy of the side's own logits and labels",
    "backward": "the gradient is not that of the side's own forward pass",
    "optimizer": "gradient, state or update is not what the side's own history makes it",
}
"""Why all others are decidable, by the stage of the first divergence."""

CONFIGURED: Final = frozenset(
    {
        "layer missing",
        "head untied",
        "epsilon of the norms 1e-3",
        "epsilon of the layer norms 1e-3",
        "rotary base 500000",
        "other activation",
        "gelu with erf instead of tanh",
        "sliding window on one side",
        "routing weights not normalised",
        "one expert per token",
    }
)
"""Planted as settings of the model. They are decidable, for a checkpoint comes with the settings
that it was trained with."""


def expected(name: str, stage: str, side: str) -> tuple[str, str]:
    """Blame that is right for a fault (`baseline`, `target`, `undecided`), and the reason."""
    if name in ASKED:
        return "undecided", ASKED[name]
    if name in CONFIGURED:
        return side, "the setting is not the one in the checkpoint's own configuration"
    return side, OF_STAGE[stage]

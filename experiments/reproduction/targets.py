"""All targets by name."""

import difflib

from experiments.reproduction import disco_clip, fastclip, fastclip_scaling, grad_cache, inf_cl, inf_cl_accuracy
from experiments.reproduction.target import Target

TARGETS = {
    target.name: target
    for module in (inf_cl, inf_cl_accuracy, grad_cache, disco_clip, fastclip, fastclip_scaling)
    for target in module.TARGETS
}


def target_named(name: str) -> Target:
    """Return a target."""
    if name not in TARGETS:
        close = difflib.get_close_matches(name, TARGETS, 1)
        advice = f"did you mean {close[0]}?" if close else "--list lists them"
        raise ValueError(f"expected --target to be one of {len(TARGETS)} targets or all, got {name!r}; {advice}")
    return TARGETS[name]

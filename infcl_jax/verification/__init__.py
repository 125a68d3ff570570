"""Verification of distributed losses and gradients against one undivided computation in float64."""

from infcl_jax.verification.api import verify
from infcl_jax.verification.report import Cause, GroupError, Report, VerificationError

__all__ = ["Cause", "GroupError", "Report", "VerificationError", "verify"]

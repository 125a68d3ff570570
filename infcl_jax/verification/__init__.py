"""Verification of distributed losses and gradients against one undivided computation in float64."""

from infcl_jax.verification.api import verify as verify
from infcl_jax.verification.report import Cause as Cause
from infcl_jax.verification.report import GroupError as GroupError
from infcl_jax.verification.report import Report as Report
from infcl_jax.verification.report import VerificationError as VerificationError

"""Whether a loop, a loss and a program do what one thinks that they do."""

from optax_tokenaccum.debug._audit import audit
from optax_tokenaccum.debug._check_loss_fn import check_loss_fn
from optax_tokenaccum.debug._report import AuditReport, LossReport, Verdict
from optax_tokenaccum.debug._whole_gradients import whole_gradients

__all__ = [
    "AuditReport",
    "LossReport",
    "Verdict",
    "audit",
    "check_loss_fn",
    "whole_gradients",
]

"""What forked ranks need, imported once."""

import dressage_torch.__main__
import transformers.models.auto.modeling_auto  # noqa: F401

__all__ = ["dressage_torch"]

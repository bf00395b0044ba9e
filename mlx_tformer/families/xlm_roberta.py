"""XLM-RoBERTa: RoBERTa with a vocabulary for a hundred languages."""

from .roberta import ABSENT, model, names

__all__ = ["ABSENT", "model", "names"]

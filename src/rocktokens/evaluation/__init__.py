"""Accuracy of a model on a task, and the ledger of evaluations a run keeps."""

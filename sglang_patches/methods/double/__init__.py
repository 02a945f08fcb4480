"""DOUBLE (Shen et al., Double Retrieval Speculative Parallelism): draft model and target both retrieve."""

from sglang_patches.methods.double.all_accepted import AllAccepted
from sglang_patches.methods.double.guidance import Guidance
from sglang_patches.methods.double.phrases import DatastorePhrases, OwnDatastorePhrases
from sglang_patches.methods.double.retrieval_chains import RetrievalChains

__all__ = ["AllAccepted", "DatastorePhrases", "Guidance", "OwnDatastorePhrases", "RetrievalChains"]

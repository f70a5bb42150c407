"""How the encode stages of a server's bases share its cores."""

from __future__ import annotations

from hplm.triton.bridge import translate
from hplm.triton.launcher.instances import count_encode_processes


def encode_processes(args: dict[str, str]) -> int:
    """Return how many processes of this server compute upper layers: those of every base of the model's repository.

    They share all cores but one, and a GPU's memory for slots. A base that comes later does not change the share of processes
    that run already.
    """
    return max(translate.instances(args), count_encode_processes(translate.version_folder(args).parents[1]))

"""What people train with where they do without us, by name. No torch here."""

from spardl.choices import check_choice

RIVALS = {
    "ddp": "DDP as it is: buckets are averaged while backward goes on",
    "fp16": "DDP with torch's fp16_compress_hook: the same in half the bytes",
    "powersgd-1": "DDP with torch's powerSGD_hook, matrices of rank 1",
    "powersgd-4": "DDP with torch's powerSGD_hook, matrices of rank 4",
}
DENSE_RIVALS = ("ddp", "fp16")  # send every entry


def check_rivals(names: list[str]) -> list[str]:
    """These, each once; raises `ConfigError` for one that is not known."""
    for name in names:
        check_choice("rivals", name, tuple(RIVALS))
    return list(dict.fromkeys(names))

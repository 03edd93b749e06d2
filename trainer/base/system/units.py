"""Units of memory and time."""

GIB = 2**30


def format_bytes(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.2f} MiB" if 0 < num_bytes < GIB / 10 else f"{num_bytes / GIB:,.2f} GiB"


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s"

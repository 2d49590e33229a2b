"""Pages that an idle session holds, by KV group, as the auditor counts them: models like gpt-oss and Gemma 3."""

from __future__ import annotations

from pathlib import Path

from benchmarks.common import save
from workers.kv import GroupSpec, Outcome, SessionCache, full_group, window_group
from workers.kv.slot import new_tokens

PAGE_SIZE, CHUNK = 16, 512
LENGTHS = (1024, 8192, 32768)
MODELS = {"gpt-oss": (128, 12, 12), "Gemma 3 27B": (1024, 10, 52)}
"""The window, and how many layers have full attention and the window."""
DOCUMENT = Path(__file__).parent.parent / "docs" / "models.md"
BEGIN, END = "<!-- memory: written by python -m benchmarks.kv_memory -->\n", "<!-- end of memory -->\n"


def pages_held(groups: list[GroupSpec], num_tokens: int) -> dict[str, int]:
    """By group, after two turns: half of the tokens each, computed in chunks, the last token not yet."""
    cache = SessionCache(groups, PAGE_SIZE)
    cache.open("s")
    tokens = new_tokens([i % 1000 for i in range(num_tokens)])
    for turn, end in enumerate((num_tokens // 2, num_tokens)):
        begin = cache.resume("s", str(turn), tokens[:end], num_tokens // 2 * turn)
        cache.reserve("s", end - begin)
        for start in range(begin, end, CHUNK):
            chunk = tokens[start : min(start + CHUNK, end)]
            cache.extend("s", len(chunk))
            cache.commit({"s": chunk})
        cache.finish("s", str(turn), Outcome.COMPLETED)
    report = cache.audit()
    assert report.ok, report
    return {group.name: group.num_held for group in report.groups}


def main() -> None:
    rows, figures = [], {}
    for name, (window, num_full, num_window) in MODELS.items():
        for num_tokens in LENGTHS:
            pages = num_tokens // PAGE_SIZE + 8
            held = pages_held([full_group(pages), window_group(pages, window)], num_tokens)
            full, windowed = held["full"], held[f"window {window}"]
            whole = full * (num_full + num_window)
            share = (full * num_full + windowed * num_window) / whole
            figures[f"{name}, {num_tokens} tokens"] = held | {"memory against full attention": round(share, 3)}
            rows.append(f"| {name} | {num_tokens:,} | {full:,} | {windowed} | {share:.2f} |\n")
    table = "| model | n | full | window | KV memory against full attention in all layers |\n"
    table += "| --- | ---: | ---: | ---: | ---: |\n" + "".join(rows)
    text = DOCUMENT.read_text()
    DOCUMENT.write_text(text.split(BEGIN)[0] + BEGIN + table + END + text.split(END)[1])
    save("kv_memory", {f"pages of {PAGE_SIZE} tokens held by an idle session": figures})


if __name__ == "__main__":
    main()

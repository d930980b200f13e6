"""``python -m dashboards`` writes ``alerts/*.yaml`` and ``grafana/*.json``; a test compares."""

from __future__ import annotations

from dashboards import boards, rules

for folder, files in ((boards.FOLDER, boards.files()), (rules.FOLDER, rules.files())):
    for name, text in files.items():
        (folder / name).write_text(text)

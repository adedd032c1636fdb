from moepress.paper.tables.base import DENSE, FULL, PAPER, Quality, Row

COLUMNS = ("Size", "TFLOPs", "SST-2", "MRPC", "MultiRC", "COPA", "WinoGrande", "SQuAD", "WikiQA", "HotpotQA")
PRINTED = {
    "dense": "220M 4.65 94.61 88.97 74.25 58.00 58.72 63.65/83.76 96.12 66.13/83.45",
    "full": "2.0B 4.65 95.75 90.20 76.19 68.00 61.80 65.39/85.81 96.45 67.55/84.60",
    "pruning": "733M 4.65 94.50 88.97 75.13 63.00 61.64 64.80/85.13 96.27 67.39/84.56",
    "task-specific": "733M 4.65 91.28 82.04 53.63 52.00 58.56 54.40/78.00 95.24 64.70/82.76",
    "averaging": "733M 4.65 92.66 88.73 74.04 62.00 59.59 64.49/84.75 96.19 67.36/84.61",
    "zipit": "733M 4.65 93.12 91.18 75.26 65.00 60.38 65.01/85.06 96.05 67.59/84.70",
    "repair": "733M 4.65 92.89 90.44 74.44 65.00 61.48 64.67/84.84 96.27 67.67/84.77",
    "git-rebasin": "733M 4.65 93.35 88.24 74.25 65.00 59.25 64.61/84.92 96.23 67.29/84.46",
    "m-smoe": "733M 4.65 94.50 90.69 75.57 68.00 61.80 65.66/85.49 96.34 67.91/84.83",
    "mc-smoe": "381M 3.83 93.35 89.22 73.98 67.00 59.52 65.41/85.30 96.08 67.64/84.77",
}
FIGURES = {name: dict(zip(COLUMNS, printed.split(), strict=True)) for name, printed in PRINTED.items()}
"""Averaging, ZipIt, REPAIR and Git Re-basin are made on the groups of M-SMoE; the authors made them on random ones."""

TABLE = Quality(
    name="main",
    title="Pruning, merging and decomposing, the other merges on the groups of M-SMoE",
    where="tab:switch-32-complete",
    columns=COLUMNS,
    ours="m-smoe",
    rows=(
        Row(DENSE.name, paper=FIGURES["dense"], dense=True),
        Row(FULL.name, paper=FIGURES["full"]),
        Row("pruning", {"method": "frequency-pruning", "preset": "paper"}, FIGURES["pruning"]),
        Row("task-specific", {"method": "task-specific"}, FIGURES["task-specific"], dies_out=True),
        *(Row(name, {"method": name}, FIGURES[name]) for name in ("averaging", "zipit", "repair", "git-rebasin")),
        Row("m-smoe", PAPER, FIGURES["m-smoe"]),
        Row("mc-smoe", PAPER | {"method": "mc-smoe"}, FIGURES["mc-smoe"], schedule="cubic"),
    ),
)

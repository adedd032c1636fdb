from moepress.paper.tables.base import PAPER, Quality, Row

TABLE = Quality(
    name="averaging",
    title="Averages of a group, the groups being the same",
    where="tab:merging-strategy",
    columns=("MultiRC", "COPA", "MRPC", "SQuAD"),
    ours="frequency",
    rows=(
        Row(
            "uniform",
            PAPER | {"merge.operator": "uniform"},
            {"MultiRC": "75.11", "COPA": "64.00", "MRPC": "89.95", "SQuAD": "64.55/84.85"},
        ),
        Row(
            "fisher",
            PAPER | {"merge.operator": "fisher"},
            {"MultiRC": "73.77", "COPA": "65.00", "MRPC": "89.46", "SQuAD": "63.99/84.44"},
        ),
        Row("frequency", PAPER, {"MultiRC": "75.57", "COPA": "68.00", "MRPC": "90.69", "SQuAD": "65.66/85.49"}),
    ),
)

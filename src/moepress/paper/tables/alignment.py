from moepress.paper.tables.base import PAPER, Quality, Row

TABLE = Quality(
    name="alignment",
    title="With and without alignment of hidden units, the groups being the same",
    where="tab:perm-ablation",
    columns=("MultiRC", "COPA", "MRPC", "SQuAD"),
    ours="aligned",
    rows=(
        Row(
            "not aligned",
            PAPER | {"align.method": "none"},
            {"MultiRC": "74.84", "COPA": "66.00", "MRPC": "89.95", "SQuAD": "64.73/84.73"},
        ),
        Row("aligned", PAPER, {"MultiRC": "75.57", "COPA": "68.00", "MRPC": "90.69", "SQuAD": "65.66/85.49"}),
        Row("aligned, to the dominant expert", {"method": "m-smoe"}),
    ),
)

from moepress.paper.tables.base import PAPER, Quality, Row

TABLE = Quality(
    name="uniform-adaptive",
    title="The same number of experts in every layer, or as many as it uses",
    where="tab:uniform-adaptive",
    columns=("MultiRC", "COPA", "MRPC", "SQuAD"),
    ours="adaptive",
    rows=(
        Row(
            "uniform",
            PAPER | {"plan.budget": "uniform"},
            {"MultiRC": "74.48", "COPA": "63.00", "MRPC": "90.44", "SQuAD": "64.36/84.56"},
        ),
        Row("adaptive", PAPER, {"MultiRC": "75.57", "COPA": "68.00", "MRPC": "90.69", "SQuAD": "65.66/85.49"}),
    ),
)

"""The page's table of models is what the exports give."""

from tests.models.table import format_table, measure, read_table


def test_the_table_is_current():
    rows = list(measure())
    assert min(cosine for *_, cosine in rows) > 0.9999
    assert read_table() == format_table(rows)

"""Numbers of a /metrics page."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families


def value(text, name, **labels):
    """The one sample of a name, such as kiln:num_steps_total, with at least these labels."""
    found = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert len(found) == 1, f"{name} {labels}: {found}"
    return found[0]


def by_label(text, name, label):
    """The samples of a name: value of the label -> number."""
    return {
        sample.labels[label]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }

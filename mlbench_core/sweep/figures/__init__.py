"""Draw the figures of a sweep: panels of bars, lines over workers or bandwidth, and the map."""

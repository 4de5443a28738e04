"""Node, link and graph tasks; metrics."""

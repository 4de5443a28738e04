"""What differs between node, link and graph tasks; metrics."""

"""One worker that trains each batch on several executors: processes or devices."""

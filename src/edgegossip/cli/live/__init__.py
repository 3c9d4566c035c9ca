"""Commands of `plan --live`."""

"""Several hosts on one Linux machine: `README.md` says how."""

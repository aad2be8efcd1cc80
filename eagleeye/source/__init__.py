"""Where windows come from: a Prometheus server, exporters scraped directly, recorded traces."""

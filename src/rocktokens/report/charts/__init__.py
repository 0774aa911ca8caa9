"""Charts as Vega-Lite specs, one spec for a page, a notebook, PNG, SVG and PDF."""

"""The keelscope dashboard, and Plotly figures of runs for notebooks.

Layers, each importing only those before it:

- `panels`, `theme`: what can be drawn and how it looks
- `levels`, `depth`, `pooling`: a series as decades over layers, reduced so that extremes stay
- `figures`: Plotly figures; never imports Dash
- `followed`, `index`, `verdicts`, `state`: the runs on show, followed while they are written
- `blocks`, `asking`, `rows`, `bands`, `pages`: what each page shows, one file a page
- `wire`, `api`, `guard`, `server`: HTTP
- `cards`, `page`, `skeleton`, `app`: the Dash app; `command` starts it
"""

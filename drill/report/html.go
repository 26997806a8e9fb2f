package report

import (
	_ "embed" // the page's parts
	"encoding/json"
	"fmt"
	"html/template"
	"io"
	"strings"
)

// The page and the libraries that draw on it: all of it is in every report,
// which so needs no network.
var (
	//go:embed page/report.html
	pageHTML string
	//go:embed page/report.js
	pageJS string
	//go:embed page/d3.min.js
	d3JS string
	//go:embed page/plot.umd.min.js
	plotJS string
	//go:embed page/d3.LICENSE
	d3License string
	//go:embed page/plot.LICENSE
	plotLicense string
)

var page = template.Must(template.New("report").Funcs(template.FuncMap{
	"lower":   strings.ToLower,
	"seconds": func(ms int64) string { return fmt.Sprintf("%.1f s", float64(ms)/1000) },
	"ms":      func(ms float64) string { return fmt.Sprintf("%.3f s", ms/1000) },
}).Parse(pageHTML))

// WriteHTML writes the report as one file that needs nothing else.
func (r *Report) WriteHTML(w io.Writer) error {
	// Marshal escapes what could end a script.
	data, err := json.Marshal(r)
	if err != nil {
		return err
	}
	other := []string{}
	details := map[string]bool{}
	for _, d := range r.Details {
		details[d.Rule+": "+d.Text] = true
	}
	for _, v := range r.Violations {
		if !details[v] {
			other = append(other, v)
		}
	}
	return page.Execute(w, struct {
		*Report
		Other                    []string
		HasControl, ControlShown bool
		Data, D3, Plot, Script   template.JS
		D3License, PlotLicense   string
	}{
		r, other, r.GuardOffViolated != nil, r.GuardOffViolated != nil && *r.GuardOffViolated,
		template.JS(data), template.JS(d3JS), template.JS(plotJS), template.JS(pageJS), d3License, plotLicense,
	})
}

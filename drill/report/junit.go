package report

import (
	"encoding/xml"
	"fmt"
	"io"
	"strings"
	"time"
)

// The part of JUnit's XML that CI systems read.
type (
	junitSuites struct {
		XMLName xml.Name     `xml:"testsuites"`
		Suites  []junitSuite `xml:"testsuite"`
	}
	junitSuite struct {
		Name      string      `xml:"name,attr"`
		Tests     int         `xml:"tests,attr"`
		Failures  int         `xml:"failures,attr"`
		Errors    int         `xml:"errors,attr"`
		Skipped   int         `xml:"skipped,attr"`
		Time      string      `xml:"time,attr"`
		Timestamp string      `xml:"timestamp,attr"`
		Cases     []junitCase `xml:"testcase"`
	}
	junitCase struct {
		Class   string       `xml:"classname,attr"`
		Name    string       `xml:"name,attr"`
		Time    string       `xml:"time,attr"`
		Failure *junitReason `xml:"failure,omitempty"`
		Error   *junitReason `xml:"error,omitempty"`
		Out     string       `xml:"system-out,omitempty"`
	}
	junitReason struct {
		Message string `xml:"message,attr"`
		Text    string `xml:",chardata"`
	}
)

// WriteJUnit writes the report as JUnit XML: a case for the invariants and one
// for each expectation. What is inconclusive is an error there, not a failure
// and never a success.
func (r *Report) WriteJUnit(w io.Writer) error {
	suite := junitSuite{
		Name: "drill " + r.Scenario, Time: fmt.Sprintf("%.3f", (time.Duration(r.DurationMS) * time.Millisecond).Seconds()),
		Timestamp: r.Began.Format("2006-01-02T15:04:05"),
	}
	add := func(c junitCase) {
		c.Class, c.Time = "drill."+r.Scenario, "0"
		suite.Tests++
		if c.Failure != nil {
			suite.Failures++
		}
		if c.Error != nil {
			suite.Errors++
		}
		suite.Cases = append(suite.Cases, c)
	}
	invariants := junitCase{Name: "invariants", Out: strings.Join(r.Checked, "\n")}
	var violations []string
	for _, v := range r.Violations {
		if !strings.HasPrefix(v, brokenPrefix) { // those have cases of their own
			violations = append(violations, v)
		}
	}
	if len(violations) > 0 {
		invariants.Failure = &junitReason{fmt.Sprintf("%d violations", len(violations)), strings.Join(violations, "\n")}
	}
	add(invariants)
	for _, e := range r.Expectations {
		c := junitCase{Name: e.Text, Out: e.Measured}
		switch e.State {
		case "broken":
			c.Failure = &junitReason{e.Measured, e.Measured}
		case "inconclusive":
			c.Error = &junitReason{"inconclusive: " + e.Why, e.Why}
		}
		add(c)
	}
	if len(r.Inconclusive) > 0 {
		add(junitCase{Name: "conclusive", Error: &junitReason{"inconclusive", strings.Join(r.Inconclusive, "\n")}})
	}
	if _, err := io.WriteString(w, xml.Header); err != nil {
		return err
	}
	enc := xml.NewEncoder(w)
	enc.Indent("", "  ")
	if err := enc.Encode(junitSuites{Suites: []junitSuite{suite}}); err != nil {
		return err
	}
	_, err := io.WriteString(w, "\n")
	return err
}

// Figures are the measured values in one line; scripts/drills-table.sh reads the
// first of them.
func (r *Report) Figures() string {
	out := []string{fmt.Sprintf("D %d ms, %d promotions, %.0f ms unowned, %d leases lost", r.DMS, r.Promotions, r.UnownedMS, r.Lost)}
	if r.FailoverMS > 0 {
		out[0] += fmt.Sprintf(", failover %d ms", r.FailoverMS)
	}
	for _, e := range r.Expectations {
		text := e.Text + ": " + e.State
		if e.Measured != "" {
			text += " (" + e.Measured + ")"
		}
		out = append(out, text)
	}
	out = append(out, r.Inconclusive...)
	out = append(out, r.Violations...)
	return strings.ReplaceAll(strings.Join(out, "; "), "\n", " ")
}

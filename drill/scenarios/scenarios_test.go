package scenarios

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"go.yaml.in/yaml/v3"

	"github.com/headlease/headlease/drill/plan"
)

func compiled(t *testing.T) *jsonschema.Schema {
	t.Helper()
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(Schema()))
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	if err := c.AddResource("schema.json", doc); err != nil {
		t.Fatal(err)
	}
	s, err := c.Compile("schema.json")
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// instance is a YAML text as a schema validator takes it.
func instance(t *testing.T, text []byte) any {
	t.Helper()
	var v any
	if err := yaml.Unmarshal(text, &v); err != nil {
		t.Fatal(err)
	}
	raw, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	out, err := jsonschema.UnmarshalJSON(bytes.NewReader(raw))
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestShippedScenariosAreGood(t *testing.T) {
	schema := compiled(t)
	for _, name := range Names() {
		text, err := Text(name)
		if err != nil {
			t.Fatal(err)
		}
		s, err := plan.Parse(text)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if s.Name != name {
			t.Errorf("%s.yaml names itself %q", name, s.Name)
		}
		if len(s.Expect) == 0 {
			t.Errorf("%s expects nothing", name)
		}
		if !slices.ContainsFunc(s.Expect, func(e plan.Expectation) bool { return e.Fact == plan.Writes || e.Fact == plan.Grants }) {
			t.Errorf("%s does not say how much work there must be for it to show something", name)
		}
		if err := schema.Validate(instance(t, text)); err != nil {
			t.Errorf("%s: schema: %v", name, err)
		}
	}
}

// The schema and the parser know the same keys and kinds.
func TestSchemaKnowsWhatTheParserKnows(t *testing.T) {
	var schema struct {
		Properties map[string]struct {
			Properties map[string]any
		}
		Defs struct {
			Step struct {
				Properties map[string]json.RawMessage
			}
		} `json:"$defs"`
	}
	if err := json.Unmarshal(Schema(), &schema); err != nil {
		t.Fatal(err)
	}
	keys := func(text string) string {
		_, err := plan.Parse([]byte(text))
		if err == nil {
			t.Fatalf("%s: no error", text)
		}
		_, list, _ := strings.Cut(strings.SplitN(err.Error(), "\n", 2)[0], "unknown key; use ")
		return list
	}
	names := func(m map[string]bool) string {
		var out []string
		for k := range m {
			out = append(out, k)
		}
		slices.Sort(out)
		return strings.Join(out, ", ")
	}
	top := map[string]bool{}
	for k := range schema.Properties {
		top[k] = true
	}
	if got, want := keys("zz: 1"), names(top); got != want {
		t.Errorf("top: the parser knows %s, the schema %s", got, want)
	}
	for _, part := range []string{"cluster", "workload"} {
		in := map[string]bool{}
		for k := range schema.Properties[part].Properties {
			in[k] = true
		}
		if got, want := keys(part+": {zz: 1}"), names(in); got != want {
			t.Errorf("%s: the parser knows %s, the schema %s", part, got, want)
		}
	}
	step := map[string]bool{}
	for k := range schema.Defs.Step.Properties {
		step[k] = true
	}
	if got, want := keys("steps: [{zz: 1}]"), names(step); got != want {
		t.Errorf("step: the parser knows %s, the schema %s", got, want)
	}
	var do struct{ Enum []string }
	if err := json.Unmarshal(schema.Defs.Step.Properties["do"], &do); err != nil {
		t.Fatal(err)
	}
	if slices.Sort(do.Enum); !slices.Equal(do.Enum, plan.Kinds()) {
		t.Errorf("kinds: the parser knows %v, the schema %v", plan.Kinds(), do.Enum)
	}
}

func TestUnknownNameListsTheKnown(t *testing.T) {
	_, err := Get("flood")
	if err == nil || !strings.Contains(err.Error(), `scenario "flood": there is none; use cable-cut, `) {
		t.Error(err)
	}
}

package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"go.yaml.in/yaml/v3"
)

// commandLimit bounds one of the operator's commands.
const commandLimit = 30 * time.Second

// MaxSize of a file of commands, in bytes.
const MaxSize = 64 << 10

// Commands is how one process is found and started: commands of the operator's,
// run by sh.
type Commands struct {
	// PID prints the process's pid; 0 or nothing: it does not run.
	PID string `yaml:"pid"`
	// Start starts it.
	Start string `yaml:"start"`
	// KeepDown is run after the process was killed or ended, so that nothing
	// else starts it meanwhile; may be empty.
	KeepDown string `yaml:"keep_down"`
}

// ParseCommands reads a file of commands by process name, strictly.
func ParseCommands(data []byte) (map[string]Commands, error) {
	var file struct {
		Processes map[string]Commands `yaml:"processes"`
	}
	d := yaml.NewDecoder(bytes.NewReader(data))
	d.KnownFields(true)
	if err := d.Decode(&file); err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%w; write 'processes: {NAME: {pid: COMMAND, start: COMMAND, keep_down: COMMAND}}'", err)
	}
	var errs []error
	if len(file.Processes) == 0 {
		errs = append(errs, errors.New("processes: names none; write 'processes: {NAME: {pid: COMMAND, start: COMMAND}}'"))
	}
	for _, name := range slices.Sorted(maps.Keys(file.Processes)) {
		c := file.Processes[name]
		if c.PID == "" {
			errs = append(errs, fmt.Errorf("processes.%s.pid: missing; write a command that prints its pid", name))
		}
		if c.Start == "" {
			errs = append(errs, fmt.Errorf("processes.%s.start: missing; write a command that starts it", name))
		}
	}
	return file.Processes, errors.Join(errs...)
}

// CommandHost is a host whose processes are found and started by commands.
type CommandHost map[string]Commands

// Names of all processes.
func (h CommandHost) Names() []string { return slices.Sorted(maps.Keys(h)) }

// PID asks the operator's command.
func (h CommandHost) PID(ctx context.Context, name string) (int, error) {
	out, err := shell(ctx, h[name].PID)
	if err != nil {
		return 0, err
	}
	if out = strings.TrimSpace(out); out == "" {
		return 0, nil
	}
	pid, err := strconv.Atoi(out)
	if err != nil || pid < 0 || pid == 1 {
		return 0, fmt.Errorf("its pid command printed %q, which is no pid", out)
	}
	if pid != 0 && (syscall.Kill(pid, 0) == syscall.ESRCH || zombie(pid)) {
		return 0, nil
	}
	return pid, nil
}

// zombie reports that a process has ended and nobody has asked how: in a
// container whose first process reaps nobody it stays for ever.
func zombie(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	// The command's name, in parentheses, may hold anything.
	_, after, _ := strings.Cut(string(stat[bytes.LastIndexByte(stat, ')')+1:]), " ")
	return strings.HasPrefix(after, "Z") || strings.HasPrefix(after, "X")
}

// Signal signals the process that the operator's command names.
func (h CommandHost) Signal(ctx context.Context, name string, sig syscall.Signal) error {
	pid, err := h.PID(ctx, name)
	if err != nil {
		return err
	}
	if pid == 0 {
		return errors.New("it does not run")
	}
	if err := syscall.Kill(pid, sig); err != nil {
		return fmt.Errorf("pid %d: %w", pid, err)
	}
	if keep := h[name].KeepDown; keep != "" && (sig == syscall.SIGKILL || sig == syscall.SIGTERM) {
		_, err = shell(ctx, keep)
	}
	return err
}

// Start runs the operator's command.
func (h CommandHost) Start(ctx context.Context, name string) error {
	_, err := shell(ctx, h[name].Start)
	return err
}

func shell(ctx context.Context, command string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, commandLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, "/bin/sh", "-c", command)
	cmd.WaitDelay = time.Second // what it started may hold its pipes
	var out, bad bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &bad
	if err := cmd.Run(); err != nil && !errors.Is(err, exec.ErrWaitDelay) {
		return "", fmt.Errorf("%q: %w: %s", command, err, strings.TrimSpace(bad.String()))
	}
	return out.String(), nil
}

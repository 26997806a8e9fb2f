// Package conventions holds tests of the repository's own rules that no linter
// knows: what docs/architecture.md calls pure is pure, the lists of the linter
// agree with it, and tests wait in virtual time only.
package conventions

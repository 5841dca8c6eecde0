use super::*;

fn shell(script: &str) -> Launch {
    Launch::new(["sh", "-c", script])
}

async fn run(launch: &Launch, input: &str) -> RunOutput {
    let supervisor = Supervisor::default();
    ProgramRun::start(&supervisor, launch, input.into(), Tail::new(100, 100))
        .unwrap()
        .wait()
        .await
        .unwrap()
}

#[tokio::test]
async fn run_returns_exit_code_and_output() {
    let output = run(&shell("cat; echo no >&2; exit 3"), "yes\n").await;
    assert_eq!(
        (output.code, output.stdout.text(), output.stderr.last_line()),
        (Some(3), "yes\n".into(), Some("no".into()))
    );
    let killed = run(&shell("kill -9 $$"), "").await;
    assert_eq!(
        (describe_exit(killed.code), exit_status(killed.code)),
        ("killed by signal 9".into(), "signal: 9".into())
    );
    // The program does not read its input, and its output exceeds the limit.
    let output = run(&shell("yes | head -c 1000000"), &"x".repeat(1 << 20)).await;
    assert!(output.stdout.text().contains("[… 999800 bytes are left out here …]"));
}

#[tokio::test]
async fn program_gets_only_named_variables() {
    // Cargo sets this variable, which represents any secret.
    let secret = "CARGO_PKG_NAME";
    assert!(std::env::var(secret).is_ok());
    let mut launch = shell(&format!("echo \"${secret},$X,${{PATH:+path}}\""));
    assert_eq!(run(&launch, "").await.stdout.text(), ",,path\n");
    launch.passes.push(secret.into());
    launch.variables.push(("X".into(), "1".into()));
    assert_eq!(run(&launch, "").await.stdout.text(), "levade-process,1,path\n");
}

#[tokio::test]
async fn dropped_run_kills_its_process_group() {
    let dir = tempfile::tempdir().unwrap();
    let launch = Launch { dir: dir.path().into(), ..shell("(sleep 0.4; touch late) & wait") };
    let mut run =
        ProgramRun::start(&Supervisor::default(), &launch, String::new(), Tail::default()).unwrap();
    let wait = tokio::time::timeout(Duration::from_millis(100), run.wait()).await;
    assert!(wait.is_err());
    drop(run);
    tokio::time::sleep(Duration::from_millis(600)).await;
    assert!(!dir.path().join("late").exists());
}

#[tokio::test]
async fn start_rejects_missing_program_or_directory() {
    for launch in [
        Launch::new(["/no/such"]),
        Launch { dir: "/no/such".into(), ..shell("") },
        Launch::default(),
    ] {
        let error = Supervisor::default().start(&launch, Input::Piped).unwrap_err();
        assert!(
            error.starts_with("cannot start")
                || error == "the command is empty, but must start with a program",
            "{error}"
        );
    }
    let missing = Supervisor(vec!["/no/such".into()]).start(&shell(""), Input::Piped).unwrap_err();
    assert!(missing.starts_with("cannot start /no/such, which supervises programs: "), "{missing}");
}

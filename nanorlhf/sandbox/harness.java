// The two Java processes of execution.py, compiled once per Python process: the harness compiles programs and runs their
// tests; the program, in a separate sandbox, answers calls. A program passes only if it passes two runs.
//
// The guarded run: the tests run in the harness, and values.java carries values to the program and back. The harness's
// classes are the prompt's text; only the member that holds the response calls the program, and so do the members and
// classes that the response itself declares. So all other code of the prompt is trusted: helpers, constants, equals()
// of its classes, constructors. Whatever the program does in its process, it can only choose the values of its answers.
//
// The plain run: the program's process loads the program again in a new class loader, with the tests compiled against
// its real classes, and runs them as the benchmark means them. A program can forge its report, but an honest one fails
// here if it is wrong in what values lose: types, identity, comparators, unmodifiable views, overloads.
//
// Not excluded: a program that answers from knowledge of the tests, tests that accept too much, and one that is right in
// the values of its answers but forges the rest. A program that ends its process, even with status 0, doesn't pass,
// because that can't be told from a forgery. A correct program fails if the tests use what can't be sent: streams,
// iterators and lambdas of the program, or static variables of the prompt that both the response and the tests change.

import java.io.*;
import java.lang.reflect.*;
import java.net.URI;
import java.nio.charset.StandardCharsets;
import java.util.*;
import java.util.regex.Pattern;
import java.util.stream.Collectors;
import javax.lang.model.element.*;
import javax.lang.model.element.Modifier; // java.lang.reflect has one too
import javax.lang.model.type.TypeKind;
import javax.lang.model.type.TypeMirror;
import javax.lang.model.util.Elements;
import javax.lang.model.util.Types;
import javax.tools.*;

import com.sun.source.tree.*;
import com.sun.source.util.JavacTask;
import com.sun.source.util.SourcePositions;
import com.sun.source.util.TreePath;
import com.sun.source.util.TreePathScanner;
import com.sun.source.util.TreeScanner;
import com.sun.source.util.Trees;

// ------------------------------------------------------------------------------------------------- 1. the program
/**
 * Answers calls of class files: NanoRlhfProgram CALLS REPLIES, two pipes. Ends when CALLS does.
 *
 *   calls     'c', a call: class, method, parameter types (null: a static field), target, arguments
 *             'r', the result of the program's call to an object of the tests: true, value; or false, exception
 *             nothing: the next message has the tests' classes, for the plain run
 *   replies   "answer", value; "exception", exception; "refused", class: not a value
 *             "call", object of the tests, method, parameter types, arguments
 *             after the plain run only its verdict
 */
class NanoRlhfProgram {
    private static final NanoRlhfSession SESSION = new NanoRlhfSession(NanoRlhfProgram.class.getClassLoader(), false);
    private static final PrintStream ERR = System.err; // the program may replace it
    private static DataInputStream calls;
    private static DataOutputStream replies;
    private static NanoRlhfValues graph; // of the call that is being answered

    public static void main(String[] args) throws IOException {
        String path = System.getProperty("java.class.path");
        File directory = new File(path.substring(path.lastIndexOf(':') + 1)).getAbsoluteFile();
        calls = new DataInputStream(new BufferedInputStream(new FileInputStream(args[0])));
        replies = new DataOutputStream(new BufferedOutputStream(new FileOutputStream(args[1])));
        for (byte[] message = receive(); message != null; message = receive()) {
            send(message.length == 0 ? runPlainly(receive(), directory) : answer(message));
        }
    }

    /** The next message; null at the end. */
    private static byte[] receive() throws IOException {
        try {
            return calls.readNBytes(calls.readInt());
        } catch (EOFException end) {
            return null;
        }
    }

    private static void send(byte[] message) throws IOException {
        replies.writeInt(message.length);
        replies.write(message);
        replies.flush();
    }

    private static byte[] answer(byte[] message) {
        NanoRlhfValues outer = graph;
        NanoRlhfValues own = new NanoRlhfValues(SESSION);
        graph = own;
        String refused;
        try {
            return own.write(new Object[] {"answer", perform((Object[]) own.read(message, 1))});
        } catch (NanoRlhfValues.Refused error) {
            refused = error.getMessage();
        } catch (Throwable error) {
            Throwable thrown = error instanceof InvocationTargetException ? error.getCause() : error;
            try {
                thrown.printStackTrace(ERR);
                return own.write(new Object[] {"exception", thrown});
            } catch (Throwable another) { // from a method of the program's own exception
                refused = thrown.getClass().getName();
            }
        } finally {
            graph = outer;
        }
        return own.write(new Object[] {"refused", refused}, false);
    }

    private static Object perform(Object[] call) throws Throwable {
        Object[] arguments = (Object[]) call[4];
        if (call[0] == null) {
            for (Object line : arguments) {
                declare(((String) line).split(" "));
            }
            return null;
        }
        Class<?> owner = Class.forName((String) call[0]);
        String name = (String) call[1];
        String types = (String) call[2];
        Object target = call[3];
        if (types == null) {
            Field field = owner.getDeclaredField(name);
            field.setAccessible(true);
            return field.get(null);
        } else if (name.startsWith("<")) {
            Constructor<?> constructor = (Constructor<?>) find(owner.getDeclaredConstructors(), owner.getName(), types);
            Object made = constructor.newInstance(arguments);
            SESSION.put((int) target, made);
            return name.equals("<init>") ? made : null;
        }
        Method method = (Method) find(owner.getDeclaredMethods(), name, types);
        boolean isAbstract = java.lang.reflect.Modifier.isAbstract(method.getModifiers());
        if (target != null && target.getClass() != owner && !isAbstract) { // perhaps a call of super
            var lookup = java.lang.invoke.MethodHandles.privateLookupIn(owner, java.lang.invoke.MethodHandles.lookup());
            return lookup.unreflectSpecial(method, owner).bindTo(target).invokeWithArguments(arguments);
        }
        return method.invoke(target, arguments);
    }

    /** A class of the prompt, and its fields. */
    private static void declare(String[] words) throws ReflectiveOperationException {
        Field[] fields = new Field[words.length - 1];
        for (int i = 0; i < fields.length; i++) {
            int dot = words[i + 1].lastIndexOf('.');
            Class<?> owner = Class.forName(words[i + 1].substring(0, dot), false, SESSION.loader);
            fields[i] = owner.getDeclaredField(words[i + 1].substring(dot + 1));
            fields[i].setAccessible(true);
        }
        SESSION.fields.put(words[0], fields);
    }

    private static Executable find(Executable[] all, String name, String types) throws NoSuchMethodException {
        for (Executable one : all) {
            boolean bridge = one instanceof Method && ((Method) one).isBridge();
            if (one.getName().equals(name) && types(one).equals(types) && !bridge) {
                one.setAccessible(true);
                return one;
            }
        }
        throw new NoSuchMethodException(name + "(" + types + ")");
    }

    static String types(Executable executable) {
        StringJoiner types = new StringJoiner(",");
        for (Class<?> type : executable.getParameterTypes()) {
            types.add(type.getCanonicalName());
        }
        return types.toString();
    }

    /** An object in place of one of the tests. */
    static Object function(int number, Class<?>[] interfaces) {
        return Proxy.newProxyInstance(SESSION.loader, interfaces, (proxy, method, arguments) -> {
            if (method.getDeclaringClass() == Object.class) {
                return method.getName().equals("equals") ? proxy == arguments[0]
                    : method.getName().equals("hashCode") ? (Object) number : "an object of the tests";
            } else if (method.isDefault()) {
                return InvocationHandler.invokeDefault(proxy, method, arguments);
            }
            Object[] given = arguments == null ? new Object[0] : arguments;
            return callTests(new Object[] {"call", proxy, method.getName(), types(method), given});
        });
    }

    private static synchronized Object callTests(Object[] call) throws Throwable {
        NanoRlhfValues own = graph;
        send(own.write(call));
        for (byte[] message = receive(); message != null; message = receive()) {
            if (message[0] == 'r') {
                Object[] result = (Object[]) own.read(message, 1);
                if ((boolean) result[0]) {
                    return result[1];
                }
                throw (Throwable) result[1];
            }
            send(answer(message)); // the tests' object calls the program
        }
        throw new EOFException();
    }

    private static byte[] runPlainly(byte[] tests, File directory) throws IOException {
        DataInputStream in = new DataInputStream(new ByteArrayInputStream(tests));
        Map<String, byte[]> classes = new HashMap<>();
        for (int count = in.readInt(); count > 0; count--) {
            String name = in.readUTF();
            classes.put(name, in.readNBytes(in.readInt()));
        }
        ClassLoader loader = new ClassLoader(SESSION.loader) {
            @Override protected Class<?> loadClass(String name, boolean resolve) throws ClassNotFoundException {
                synchronized (getClassLoadingLock(name)) {
                    Class<?> found = findLoadedClass(name);
                    byte[] code = classes.get(name);
                    File file = new File(directory, name.replace('.', '/') + ".class");
                    if (found == null && code == null && !name.startsWith("NanoRlhf") && file.exists()) {
                        try (FileInputStream in = new FileInputStream(file)) {
                            code = in.readAllBytes();
                        } catch (IOException error) {
                            throw new ClassNotFoundException(name, error);
                        }
                    }
                    return found != null ? found
                        : code == null ? super.loadClass(name, resolve) : defineClass(name, code, 0, code.length);
                }
            }
        };
        for (String name : classes.keySet()) {
            loader.setClassAssertionStatus(name, true);
        }
        Thread.currentThread().setContextClassLoader(loader);
        System.setOut(new PrintStream(OutputStream.nullOutputStream())); // the guarded run has printed the same
        System.setErr(ERR);
        return NanoRlhfTests.run(loader, ERR).getBytes(StandardCharsets.UTF_8);
    }
}

// ------------------------------------------------------------------------------------------------- 2. the harness
/**
 * Compiles one program after another and runs their tests. All messages start with their length.
 *
 *   in    compile: directory for the class files, the program's prefix, response and suffix, the tests
 *   out   'c', nothing or javac's messages; if there are messages, the request ends here
 *   in    an empty message: run the tests; any other: don't, the program has already failed
 *   out   'q', a call for the program                                     } any number of times
 *   in    the program's reply, or nothing if it has ended                 }
 *   out   'p', the tests' classes for the plain run, if the tests have passed
 *   out   'v', the verdict, the share of tests that passed, a line feed, the tests' output
 */
class NanoRlhfHarness {
    private static final int TAIL = 8000; // characters of the tests' output to keep
    private static final Pattern NAME = Pattern.compile("(?<![\\w.$])[A-Za-z_$][\\w$]*");
    private static final DataInputStream IN = new DataInputStream(System.in);
    private static final DataOutputStream OUT = new DataOutputStream(new FileOutputStream(FileDescriptor.out));

    public static void main(String[] args) throws IOException {
        File launcher = new File(args[0]);
        while (true) { // until the input ends: EOFException
            String[] request = new String[5];
            for (int i = 0; i < request.length; i++) {
                request[i] = new String(receive(), StandardCharsets.UTF_8);
            }
            File directory = new File(request[0]);
            Compilation compilation = new Compilation(launcher, directory);
            String problem = compilation.compile(request[1], request[2], request[3], request[4]);
            send('c', problem.getBytes(StandardCharsets.UTF_8));
            if (problem.isEmpty() && receive().length == 0) {
                send('v', run(compilation).getBytes(StandardCharsets.UTF_8));
            }
        }
    }

    static byte[] ask(char kind, byte[] message) {
        try {
            byte[] call = new byte[1 + message.length];
            call[0] = (byte) kind;
            System.arraycopy(message, 0, call, 1, message.length);
            send('q', call);
            byte[] reply = receive();
            if (reply.length == 0) {
                throw new NanoRlhfTests.Ended();
            }
            return reply;
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
    }

    private static byte[] receive() throws IOException {
        return IN.readNBytes(IN.readInt());
    }

    private static synchronized void send(char kind, byte[] content) throws IOException {
        OUT.writeByte(kind);
        OUT.writeInt(content.length);
        OUT.write(content);
        OUT.flush();
    }

    // ------------------------------------------------------------------------------------------------ 2.1 the tests
    private static String run(Compilation compilation) throws IOException {
        Tail tail = new Tail();
        PrintStream stdout = System.out, stderr = System.err;
        PrintStream captured = new PrintStream(tail, true, StandardCharsets.UTF_8);
        System.setOut(captured);
        System.setErr(captured);
        String word;
        try {
            ClassLoader loader = new ClassLoader(NanoRlhfHarness.class.getClassLoader()) {
                @Override protected Class<?> findClass(String name) throws ClassNotFoundException {
                    byte[] code = compilation.classes.get(name);
                    if (code == null) {
                        throw new ClassNotFoundException(name);
                    }
                    return defineClass(name, code, 0, code.length);
                }
            };
            compilation.testClasses.forEach(name -> loader.setClassAssertionStatus(name, true));
            NanoRlhfSession session = new NanoRlhfSession(loader, true);
            NanoRlhfTests.begin(session, declare(compilation, session));
            word = NanoRlhfTests.run(loader, captured);
        } finally {
            System.setOut(stdout);
            System.setErr(stderr);
        }
        if (word.equals("passed") && NanoRlhfTests.answers == 0) {
            captured.println("the tests never called the program");
            word = "wrong_answer";
        } else if (word.equals("passed")) {
            Map<String, byte[]> classes = new LinkedHashMap<>();
            String problem = compilation.compilePlainly(classes);
            if (!problem.isEmpty()) {
                captured.println(problem);
                word = "exception";
            }
            ByteArrayOutputStream bytes = new ByteArrayOutputStream();
            DataOutputStream out = new DataOutputStream(bytes);
            out.writeInt(classes.size());
            for (Map.Entry<String, byte[]> each : classes.entrySet()) {
                out.writeUTF(each.getKey());
                out.writeInt(each.getValue().length);
                out.write(each.getValue());
            }
            send('p', bytes.toByteArray());
        }
        double share = compilation.sharePassed(word.equals("passed"));
        return word + " " + share + "\n" + tail.toString(StandardCharsets.UTF_8);
    }

    /** The classes whose objects the program may send: for each its name, and the fields with their classes. */
    private static String[] declare(Compilation compilation, NanoRlhfSession session) {
        List<String> lines = new ArrayList<>();
        for (String name : compilation.promptClasses) {
            try {
                Class<?> type = Class.forName(name, false, session.loader);
                List<Field> fields = new ArrayList<>();
                Class<?> base = type;
                for (; base != null && base.getClassLoader() == session.loader; base = base.getSuperclass()) {
                    for (Field field : base.getDeclaredFields()) {
                        if (!java.lang.reflect.Modifier.isStatic(field.getModifiers())) {
                            field.setAccessible(true);
                            fields.add(field);
                        }
                    }
                }
                boolean isPlain = base == null || base == Object.class || base == Enum.class || base == Record.class
                    || Throwable.class.isAssignableFrom(base);
                if (isPlain && !type.isAnonymousClass() && !type.isLocalClass()) {
                    session.fields.put(name, fields.toArray(Field[]::new));
                    lines.add(fields.stream().map(f -> " " + f.getDeclaringClass().getName() + "." + f.getName())
                        .collect(Collectors.joining("", name, "")));
                }
            } catch (ClassNotFoundException | LinkageError error) {
                throw new IllegalStateException(error);
            }
        }
        return lines.toArray(String[]::new);
    }

    /** Keeps the end of what is written. */
    private static class Tail extends ByteArrayOutputStream {
        @Override public synchronized void write(byte[] bytes, int start, int length) {
            super.write(bytes, start, length);
            if (count > 2 * TAIL) {
                System.arraycopy(buf, count - TAIL, buf, 0, TAIL);
                count = TAIL;
            }
        }

        @Override public synchronized void write(int b) {
            write(new byte[] {(byte) b}, 0, 1);
        }
    }

    // --------------------------------------------------------------------------------------------- 2.2 the compiler
    private static final JavaCompiler JAVAC = ToolProvider.getSystemJavaCompiler();
    private static final StandardJavaFileManager FILES = JAVAC.getStandardFileManager(null, null, null);
    private static final List<String> OPTIONS = List.of("-proc:none", "-nowarn", "-implicit:none");

    /** Messages of a run of javac. */
    private static class Messages {
        final DiagnosticCollector<JavaFileObject> found = new DiagnosticCollector<>();
        final StringWriter crash = new StringWriter(); // what javac prints besides

        JavacTask task(JavaFileManager files, Source... sources) {
            return (JavacTask) JAVAC.getTask(crash, files, found, OPTIONS, null, List.of(sources));
        }

        String errors(String prefix) {
            StringBuilder messages = new StringBuilder();
            for (Diagnostic<?> diagnostic : found.getDiagnostics()) {
                if (diagnostic.getKind() == Diagnostic.Kind.ERROR) {
                    messages.append(prefix).append(diagnostic).append('\n');
                }
            }
            if (messages.isEmpty() && !crash.toString().isEmpty()) {
                throw new IllegalStateException(crash.toString()); // out of memory or stack, or a bug in javac
            }
            return messages.toString();
        }
    }

    /** A program and its tests. */
    private static class Compilation {
        final Map<String, byte[]> classes = new LinkedHashMap<>(); // of the guarded run
        final Set<String> promptClasses = new LinkedHashSet<>(); // of these, all that aren't the tests'
        final List<String> testClasses = new ArrayList<>(); // on the top level
        private final File launcher;
        private final File directory;
        private String source; // the tests with the prompt's imports

        Compilation(File launcher, File directory) {
            this.launcher = launcher;
            this.directory = directory;
        }

        /**
         * Compile a program to the directory, and its tests with the prompt's classes to memory. No text of the response
         * reaches the tests' compilation, only signatures of members and classes that the response declares. Returns ""
         * or javac's messages.
         */
        String compile(String prefix, String response, String suffix, String tests) throws IOException {
            Messages messages = new Messages();
            FILES.setLocation(StandardLocation.CLASS_PATH, List.of());
            FILES.setLocation(StandardLocation.CLASS_OUTPUT, List.of(directory));
            JavacTask task = messages.task(FILES, new Source("Main", prefix + response + suffix));
            CompilationUnitTree unit = task.parse().iterator().next();
            task.analyze();
            if (!messages.errors("").isEmpty()) {
                return messages.errors("");
            }
            Prompt prompt = new Prompt(prefix, suffix);
            source = prompt.imports + tests;
            CompilationUnitTree testTree = new Messages().task(FILES, new Source("Main", source)).parse().iterator().next();
            for (Tree type : testTree.getTypeDecls()) {
                if (type instanceof ClassTree tree) {
                    testClasses.add(tree.getSimpleName().toString());
                }
            }
            for (Tree type : unit.getTypeDecls()) {
                if (type instanceof ClassTree tree && testClasses.contains(tree.getSimpleName().toString())) {
                    return "error: duplicate class: " + tree.getSimpleName() + ", the tests have one of this name";
                }
            }
            Stubs stubs = new Stubs(task, unit, prompt, prefix.length() + response.length(), testTree);
            String code = stubs.promptCode();
            Source[] sources = {
                new Source("Main", source), new Source("Prompt", code), new Source("Stubs", stubs.classes(code))};
            task.generate(); // afterwards javac has dropped the classes
            if (!messages.errors("").isEmpty()) {
                return messages.errors("");
            }
            FILES.setLocation(StandardLocation.CLASS_PATH, List.of(launcher));
            Messages rest = new Messages();
            rest.task(new InMemory(classes, promptClasses), sources).call();
            return rest.errors("the tests don't fit the program: ");
        }

        /** The share of the tests' throws that were reached and not called; without any, 1 if the tests passed. */
        double sharePassed(boolean passed) {
            int line = 0, all = 0, reached = 0;
            for (String text : source.split("\n", -1)) {
                int throwing = text.split("NanoRlhfTests\\.fail\\(", -1).length - 1;
                line++;
                all += throwing;
                reached += NanoRlhfTests.line == 0 || line < NanoRlhfTests.line ? throwing : 0;
            }
            return all == 0 ? (passed ? 1 : 0) : Math.max(reached - NanoRlhfTests.failures, 0) / (double) all;
        }

        /** Compile the tests against the program's own classes. */
        String compilePlainly(Map<String, byte[]> plain) throws IOException {
            FILES.setLocation(StandardLocation.CLASS_PATH, List.of(launcher, directory));
            Messages messages = new Messages();
            messages.task(new InMemory(plain, new HashSet<>()), new Source("Main", source)).call();
            return messages.errors("the tests don't fit the program: ");
        }
    }

    /** What the prompt declares, as javac parses it with a filler in place of the response. */
    private static class Prompt {
        private static final Pattern NO_CODE = Pattern.compile( // comments, text blocks, strings, characters
            "/\\*.*?\\*/|//[^\\r\\n]*|\"\"\".*?\"\"\"|\"(?:\\\\.|[^\"\\\\\\r\\n])*\"|'(?:\\\\.|[^'\\\\])+'", Pattern.DOTALL);
        private static final List<String> FILLERS = List.of("\nthrow null;", "\n", "\nnull;", "\nnull", "\nnull);", "\n;");
        final String imports; // one per line
        String text;
        int hole; // where the response is
        int last; // the last token before it, if the prompt ends in the middle of a line
        CompilationUnitTree unit;
        private SourcePositions positions;

        Prompt(String prefix, String suffix) throws IOException {
            String code = NO_CODE.matcher(prefix).replaceAll(match -> " ".repeat(match.end() - match.start()));
            int cut = Math.max(code.lastIndexOf('{'), Math.max(code.lastIndexOf('}'), code.lastIndexOf(';'))) + 1;
            boolean isFound = false;
            for (int end : new int[] {prefix.length(), cut}) { // up to the last statement if nothing else can be parsed
                String closed = closers(code.substring(0, end));
                List<String> rests = new ArrayList<>();
                if (!suffix.isBlank()) {
                    FILLERS.forEach(filler -> rests.add(filler + suffix));
                    for (int i = 1; i <= closed.length(); i++) { // the response closes the method itself
                        rests.add(FILLERS.get(0) + closed.substring(0, i) + suffix);
                    }
                }
                FILLERS.forEach(filler -> rests.add(filler + closed));
                for (int i = 0; i < rests.size() && !isFound; i++) {
                    isFound = parse(prefix.substring(0, end) + rests.get(i));
                    hole = end;
                }
            }
            if (!isFound) { // a part that javac repairs: it will be replaced
                hole = prefix.length();
                parse(prefix + FILLERS.get(0) + closers(code));
            }
            String tail = prefix.substring(0, hole).stripTrailing();
            last = prefix.substring(tail.length(), hole).matches("(?s).*\\R.*") ? hole : Math.max(tail.length() - 1, 0);
            String lines = unit.getImports().stream().map(Tree::toString).collect(Collectors.joining());
            imports = lines.isEmpty() ? "import java.util.*;\n" : lines.replaceAll("\\R+", "\n");
        }

        private boolean parse(String whole) throws IOException {
            Messages messages = new Messages();
            JavacTask task = messages.task(FILES, new Source("Prompt", whole));
            text = whole;
            unit = task.parse().iterator().next();
            positions = Trees.instance(task).getSourcePositions();
            return messages.errors("").isEmpty();
        }

        /** What closes the brackets that are open at the end of this code. */
        private static String closers(String code) {
            StringBuilder open = new StringBuilder();
            for (char c : code.toCharArray()) {
                if ("({[".indexOf(c) >= 0) {
                    open.append(c);
                } else if (")}]".indexOf(c) >= 0 && !open.isEmpty()) {
                    open.setLength(open.length() - 1);
                }
            }
            StringBuilder closers = new StringBuilder();
            for (int i = open.length() - 1; i >= 0; i--) {
                closers.append(")}]".charAt("({[".indexOf(open.charAt(i))));
                if (open.charAt(i) != '{' && i > 0 && open.charAt(i - 1) == '{') {
                    closers.append(';');
                }
            }
            return closers.toString();
        }

        /** The member at the end of a path; null if it ends in a class. */
        static Tree member(List<Tree> path) {
            Tree end = path.isEmpty() ? null : path.get(path.size() - 1);
            return end instanceof ClassTree ? null : end;
        }

        int start(Tree tree) {
            return (int) positions.getStartPosition(unit, tree);
        }

        int end(Tree tree) {
            return (int) positions.getEndPosition(unit, tree);
        }

        /** The body of an enumeration's constant; any other member itself. */
        private static Tree bodyOf(Tree member, ClassTree type) {
            boolean isConstant = type.getKind() == Tree.Kind.ENUM && member instanceof VariableTree field
                && field.getInitializer() instanceof NewClassTree made && made.getClassBody() != null
                && made.getIdentifier().toString().equals(type.getSimpleName().toString());
            return isConstant ? ((NewClassTree) ((VariableTree) member).getInitializer()).getClassBody() : member;
        }

        /** The classes around a position, from the outermost; and then the member that it is in, if it is in one. */
        List<Tree> path(int position) {
            List<Tree> path = new ArrayList<>();
            List<? extends Tree> trees = unit.getTypeDecls();
            for (int i = 0; i < trees.size(); i++) {
                Tree tree = trees.get(i);
                if (start(tree) <= position && position < end(tree) && !(tree instanceof EmptyStatementTree)) {
                    Tree inner = path.isEmpty() ? tree : bodyOf(tree, (ClassTree) path.get(path.size() - 1));
                    path.add(inner);
                    if (!(inner instanceof ClassTree type)) {
                        break;
                    }
                    trees = type.getMembers();
                    i = -1;
                }
            }
            return path;
        }
    }

    /** The tests' view of the program: the prompt's classes and stubs, which call it. */
    private static class Stubs {
        private static final Set<Tree.Kind> TRUTHS = Set.of( // where a value is a condition
            Tree.Kind.IF, Tree.Kind.WHILE_LOOP, Tree.Kind.ASSERT, Tree.Kind.CONDITIONAL_EXPRESSION,
            Tree.Kind.LOGICAL_COMPLEMENT, Tree.Kind.CONDITIONAL_AND, Tree.Kind.CONDITIONAL_OR);
        private final Prompt prompt;
        private final Trees trees;
        private final Types types;
        private final Elements elements;
        private final Map<Integer, Element> program = new HashMap<>(); // members by their start
        private final Map<Element, Integer> starts = new HashMap<>();
        private final Map<String, TypeElement> own = new LinkedHashMap<>(); // the top-level classes of the response
        private final Map<String, String> stubs = new LinkedHashMap<>(); // of these
        private final Set<String> closed = new HashSet<>(); // the response may not give these names a meaning
        private final Set<String> used = new HashSet<>(); // names in the tests
        private final TreeMap<Integer, String> edits = new TreeMap<>(Comparator.reverseOrder()); // of the prompt's text
        private final Map<Integer, Integer> ends = new HashMap<>();
        private final int end; // of the response
        private final boolean isWhole; // no class of the prompt holds the response

        Stubs(JavacTask task, CompilationUnitTree unit, Prompt prompt, int end, CompilationUnitTree tests) {
            this.prompt = prompt;
            this.end = end;
            trees = Trees.instance(task);
            types = task.getTypes();
            elements = task.getElements();
            SourcePositions positions = trees.getSourcePositions();
            new TreePathScanner<Void, Void>() {
                @Override public Void visitClass(ClassTree tree, Void none) {
                    super.visitClass(tree, none);
                    return put(tree);
                }

                @Override public Void visitMethod(MethodTree tree, Void none) {
                    return positions.getEndPosition(unit, tree) < 0 ? none : put(tree); // without a default constructor
                }

                @Override public Void visitVariable(VariableTree tree, Void none) {
                    super.visitVariable(tree, none);
                    return put(tree);
                }

                private Void put(Tree tree) {
                    Element element = trees.getElement(getCurrentPath());
                    program.put((int) positions.getStartPosition(unit, tree), element);
                    starts.put(element, (int) positions.getStartPosition(unit, tree));
                    return null;
                }
            }.scan(unit, null);
            for (Tree tree : unit.getTypeDecls()) {
                int start = (int) positions.getStartPosition(unit, tree);
                if (program.get(start) instanceof TypeElement type && isResponse(type)) {
                    String name = type.getSimpleName().toString();
                    own.put(name, type);
                    if (isTaken(name)) {
                        closed.add(name);
                    }
                }
            }
            names(tests, used);
            own.keySet().removeAll(closed);
            isWhole = prompt.path(prompt.hole).isEmpty();
            if (isWhole) {
                own.keySet().removeAll(judges(tests, own.keySet()));
            }
        }

        private boolean isResponse(Element element) {
            int start = starts.getOrDefault(element, -1);
            return prompt.hole <= start && start < end;
        }

        /** The names that a tree uses, without those that it only declares. */
        private static void names(Tree tree, Set<String> names) {
            new TreeScanner<Void, Void>() {
                @Override public Void visitIdentifier(IdentifierTree name, Void none) {
                    names.add(name.getName().toString());
                    return none;
                }

                @Override public Void visitMemberSelect(MemberSelectTree name, Void none) {
                    names.add(name.getIdentifier().toString());
                    return super.visitMemberSelect(name, none);
                }
            }.scan(tree, null);
        }

        /** The response may not define a name that java.lang or an import already defines, such as Math. */
        private boolean isTaken(String name) {
            boolean isTaken = name.startsWith("NanoRlhf") || name.equals("java") || name.equals("javax");
            isTaken |= elements.getTypeElement("java.lang." + name) != null;
            for (ImportTree each : prompt.unit.getImports()) {
                String imported = each.getQualifiedIdentifier().toString();
                String owner = imported.substring(0, imported.lastIndexOf('.'));
                if (each.isStatic() && elements.getTypeElement(owner) != null) {
                    isTaken |= elements.getAllMembers(elements.getTypeElement(owner)).stream()
                        .anyMatch(member -> member.getSimpleName().contentEquals(name));
                }
                isTaken |= imported.equals(owner + "." + name)
                    || imported.endsWith("*") && elements.getTypeElement(owner + "." + name) != null;
            }
            return isTaken || prompt.unit.getImports().isEmpty() && elements.getTypeElement("java.util." + name) != null;
        }

        /**
         * Classes of a response without a prompt that would judge its other classes: the tests pass an answer of these
         * to a method, together with another argument, or where its truth decides.
         */
        private static Set<String> judges(CompilationUnitTree tests, Set<String> classes) {
            Set<String> judges = new HashSet<>();
            Map<String, Set<String>> variables = new HashMap<>(); // the classes that their values come from
            new TreePathScanner<Void, Void>() {
                private Set<String> origins(Tree tree) {
                    Set<String> names = new HashSet<>();
                    names(tree, names);
                    Set<String> origins = new HashSet<>(names);
                    origins.retainAll(classes);
                    names.forEach(name -> origins.addAll(variables.getOrDefault(name, Set.of())));
                    return origins;
                }

                private boolean decides(TreePath path) {
                    Tree user = path.getParentPath().getLeaf();
                    return user instanceof ParenthesizedTree ? decides(path.getParentPath())
                        : TRUTHS.contains(user.getKind())
                            || user instanceof VariableTree variable && "boolean".equals(String.valueOf(variable.getType()));
                }

                @Override public Void visitVariable(VariableTree tree, Void none) {
                    variables.computeIfAbsent(tree.getName().toString(), name -> new HashSet<>())
                        .addAll(origins(tree.getInitializer()));
                    return super.visitVariable(tree, none);
                }

                @Override public Void visitAssignment(AssignmentTree tree, Void none) {
                    variables.computeIfAbsent(tree.getVariable().toString(), name -> new HashSet<>())
                        .addAll(origins(tree.getExpression()));
                    return super.visitAssignment(tree, none);
                }

                @Override public Void visitMethodInvocation(MethodInvocationTree tree, Void none) {
                    if (tree.getMethodSelect() instanceof MemberSelectTree method) {
                        Set<String> owners = origins(method.getExpression());
                        for (Tree argument : tree.getArguments()) {
                            Set<String> others = origins(argument);
                            others.removeAll(owners);
                            if (!others.isEmpty() && (tree.getArguments().size() > 1 || decides(getCurrentPath()))) {
                                judges.addAll(owners);
                            }
                        }
                    }
                    return super.visitMethodInvocation(tree, none);
                }
            }.scan(tests, null);
            return judges;
        }

        // ---------------------------------------------------------------------------------- 2.3 the prompt's classes
        /** The prompt's text with a call of the program in place of what the response completes. */
        String promptCode() {
            List<Tree> path = prompt.path(prompt.last);
            Tree target = Prompt.member(path);
            List<Tree> inside = prompt.path(prompt.hole);
            boolean isBetween = Prompt.member(inside) == null;
            boolean isOwn = isWhole && own.keySet().stream().anyMatch(used::contains);
            Set<String> mentioned = new HashSet<>(); // by the prompt's own code
            for (Tree tree : prompt.unit.getTypeDecls()) {
                names(tree, mentioned);
            }
            for (ClassTree type : classes()) {
                isOwn |= complete(type, isBetween && !inside.isEmpty() && inside.get(inside.size() - 1) == type, mentioned);
            }
            if (target == null && !isOwn) { // the prompt is complete: the last method that the tests call
                for (ClassTree type : classes()) {
                    for (Tree member : type.getMembers()) {
                        if (member instanceof MethodTree method && method.getBody() != null
                            && prompt.end(method) <= prompt.hole && used.contains(method.getName().toString())
                            && (target == null || prompt.start(target) < prompt.start(method))) {
                            target = method;
                        }
                    }
                }
                path = target == null ? path : prompt.path(prompt.start(target));
            }
            if (target != null) {
                ask(target, (ClassTree) path.get(path.size() - 2));
            }
            for (Tree tree : prompt.unit.getTypeDecls()) {
                if (tree instanceof ClassTree type && type.getSimpleName().toString().startsWith("NanoRlhf")) {
                    edit(prompt.start(tree), prompt.end(tree), "");
                }
            }
            StringBuilder text = new StringBuilder(prompt.text);
            edits.forEach((start, replacement) -> text.replace(start, Math.max(start, ends.get(start)), replacement));
            return text.toString();
        }

        private void edit(int start, int stop, String replacement) {
            edits.merge(start, replacement, String::concat);
            ends.merge(start, stop, Math::max);
        }

        /** All classes of the prompt that are a class's member or on the top level. */
        private List<ClassTree> classes() {
            List<ClassTree> classes = new ArrayList<>();
            Deque<Tree> todo = new ArrayDeque<>(prompt.unit.getTypeDecls());
            while (!todo.isEmpty()) {
                if (todo.poll() instanceof ClassTree type) {
                    classes.add(type);
                    todo.addAll(type.getMembers());
                }
            }
            return classes;
        }

        /**
         * Add members that the response declares: to the class between whose members it is, all that have a new name; to
         * others those that the prompt's code mentions. Returns whether the tests use one.
         */
        private boolean complete(ClassTree type, boolean isBetween, Set<String> mentioned) {
            if (!(program.get(prompt.start(type)) instanceof TypeElement element)) {
                return false;
            }
            Set<String> given = new HashSet<>();
            given(element, given);
            boolean hasConstructor = type.getMembers().stream()
                .anyMatch(member -> member instanceof MethodTree method && method.getReturnType() == null);
            boolean hasGiven = hasConstructor;
            boolean isUsed = false;
            boolean hasFields = false;
            StringBuilder text = new StringBuilder();
            for (Element member : element.getEnclosedElements()) {
                String name = member.getSimpleName().toString();
                if (isResponse(member)) {
                    isUsed |= isBetween && used.contains(name.equals("<init>") ? type.getSimpleName().toString() : name);
                    hasFields |= member.getKind() == ElementKind.FIELD && !member.getModifiers().contains(Modifier.STATIC);
                    hasConstructor |= member.getKind() == ElementKind.CONSTRUCTOR;
                    boolean isNew = member.getKind() == ElementKind.CONSTRUCTOR ? !hasGiven : !given.contains(name);
                    if (isNew && !isTaken(name) && (isBetween || mentioned.contains(name))) {
                        text.append(stub(member, element, false));
                    }
                }
            }
            boolean isInner = element.getNestingKind().isNested() && !element.getModifiers().contains(Modifier.STATIC);
            if (hasFields && element.getKind() == ElementKind.CLASS && !isInner) {
                twin(type, element, hasConstructor, text);
            }
            if (text.length() > 0) {
                edit(prompt.end(type) - 1, prompt.end(type) - 1, text.toString());
            }
            return isUsed;
        }

        /** The names that the prompt gives to members of a class, of its base classes and of those around it. */
        private void given(TypeElement type, Set<String> names) {
            for (Element member : type.getEnclosedElements()) {
                boolean isOpen = member.getModifiers().contains(Modifier.ABSTRACT) && member instanceof ExecutableElement;
                if (starts.containsKey(member) && !isResponse(member) && !isOpen) {
                    names.add(member.getSimpleName().toString());
                }
            }
            for (TypeMirror base : types.directSupertypes(type.asType())) {
                given((TypeElement) types.asElement(base), names);
            }
            if (type.getEnclosingElement() instanceof TypeElement outer) {
                given(outer, names);
            } else {
                classes().forEach(each -> names.add(each.getSimpleName().toString()));
            }
        }

        /** Make the objects of a class in the program too: the response has added fields to it. */
        private void twin(ClassTree type, TypeElement element, boolean hasConstructor, StringBuilder text) {
            String call = "NanoRlhfTests.twin(this, \"" + elements.getBinaryName(element) + "\", ";
            if (!hasConstructor) {
                text.append(type.getSimpleName()).append("() { ").append(call).append("\"\"); }\n");
            }
            for (Tree member : type.getMembers()) {
                if (member instanceof MethodTree method && method.getReturnType() == null && method.getBody() != null
                    && program.get(prompt.start(method)) instanceof ExecutableElement constructor) {
                    Tree first = firstCall(method);
                    int start = first == null ? prompt.start(method.getBody()) + 1 : prompt.end(first);
                    String arguments = method.getParameters().stream().map(parameter -> ", " + parameter.getName())
                        .collect(Collectors.joining());
                    edit(start, start, call + "\"" + erased(constructor) + "\"" + arguments + ");");
                }
            }
        }

        /** A constructor's call of another one. */
        private static Tree firstCall(MethodTree constructor) {
            for (Tree statement : constructor.getBody().getStatements()) {
                return statement.toString().matches("(?s)(this|super)\\(.*") ? statement : null;
            }
            return null;
        }

        /** Replace the body of a method or constructor, or a static variable's value, by a call of the program. */
        private void ask(Tree target, ClassTree type) {
            Element element = program.get(prompt.start(target));
            String owner = program.get(prompt.start(type)) instanceof TypeElement known
                ? "\"" + elements.getBinaryName(known) + "\", " : "getClass().getName(), ";
            if (target instanceof VariableTree field && field.getInitializer() != null) {
                edit(prompt.start(field.getInitializer()), prompt.end(field.getInitializer()),
                    "(" + field.getType() + ") NanoRlhfTests.call(" + owner + "\"" + field.getName() + "\", null, null)");
            } else if (target instanceof BlockTree block) { // a static block assigns variables
                StringBuilder text = new StringBuilder("{ ");
                for (Tree member : type.getMembers()) {
                    if (member instanceof VariableTree field && field.getInitializer() == null
                        && field.getModifiers().getFlags().contains(Modifier.STATIC) && block.isStatic()) {
                        text.append(field.getName()).append(" = (").append(field.getType()).append(") NanoRlhfTests.call(")
                            .append(owner).append('"').append(field.getName()).append("\", null, null); ");
                    }
                }
                int start = prompt.text.indexOf('{', prompt.start(block));
                edit(start, prompt.end(block), text + "}");
            } else if (target instanceof MethodTree method && method.getBody() != null
                && element instanceof ExecutableElement executable) {
                StringJoiner arguments = new StringJoiner(", ", ", new Object[] {", "}); }");
                method.getParameters().forEach(parameter -> arguments.add(parameter.getName()));
                String body;
                if (method.getReturnType() == null) {
                    body = construct(type, method, owner + "\"" + erased(executable) + "\"" + arguments);
                } else {
                    boolean isStatic = executable.getModifiers().contains(Modifier.STATIC);
                    String result = method.getReturnType().toString();
                    body = "{ " + (result.equals("void") ? "" : "return (" + result + ") ")
                        + "NanoRlhfTests.call(" + owner + "\"" + method.getName() + "\", \"" + erased(executable) + "\", "
                        + (isStatic ? "null" : "this") + arguments;
                }
                edit(prompt.start(method.getBody()), prompt.end(method.getBody()), body);
            }
        }

        /** A constructor's body: the program makes the object, whose fields can't be final here. */
        private String construct(ClassTree type, MethodTree constructor, String call) {
            for (Tree member : type.getMembers()) {
                if (member instanceof VariableTree field && field.getInitializer() == null
                    && field.getModifiers().getFlags().contains(Modifier.FINAL)) {
                    int start = prompt.start(field.getModifiers());
                    int stop = prompt.end(field.getModifiers());
                    edit(start, stop, prompt.text.substring(start, stop).replaceAll("\\bfinal\\b", ""));
                }
            }
            Tree first = firstCall(constructor);
            boolean isGiven = first != null && prompt.end(first) <= prompt.hole;
            return "{ " + (isGiven ? prompt.text.substring(prompt.start(first), prompt.end(first)) : "")
                + "NanoRlhfTests.construct(this, " + call;
        }

        // ---------------------------------------------------------------------------------- 2.4 the response's classes
        /** Classes of the response with its signatures, whose members call the program: those that other code mentions. */
        String classes(String promptCode) throws IOException {
            Set<String> mentioned = isWhole ? new HashSet<>(used) : new HashSet<>();
            names(new Messages().task(FILES, new Source("Prompt", promptCode)).parse().iterator().next(), mentioned);
            Set<String> done = new LinkedHashSet<>();
            Deque<String> todo = new ArrayDeque<>(own.keySet());
            todo.removeIf(name -> !mentioned.contains(name));
            StringBuilder text = new StringBuilder(prompt.imports);
            while (!todo.isEmpty()) {
                String name = todo.poll();
                if (done.add(name)) {
                    stubs.put(name, stub(own.get(name), null, false));
                    todo.addAll(namesIn(stubs.get(name), own.keySet()));
                }
            }
            stubs.values().forEach(text::append);
            return text.toString();
        }

        private static List<String> namesIn(String text, Set<String> among) {
            return NAME.matcher(text).results().map(match -> match.group()).filter(among::contains).distinct().toList();
        }

        /** The text of a member or class of the response; "" if the tests may not use it. */
        private String stub(Element element, TypeElement owner, boolean isInterface) {
            Set<Modifier> modifiers = element.getModifiers();
            boolean isStatic = modifiers.contains(Modifier.STATIC);
            String name = element.getSimpleName().toString();
            if (modifiers.contains(Modifier.PRIVATE)) {
                return "";
            } else if (element instanceof TypeElement type) {
                return type.getKind() == ElementKind.ANNOTATION_TYPE ? "" : classStub(type, owner != null);
            }
            String ask = "NanoRlhfTests.call(\"" + elements.getBinaryName(owner) + "\", \"" + name + "\", ";
            String head;
            String body = ";\n";
            if (element instanceof VariableElement field) {
                String type = field.asType().toString();
                head = "public " + (isStatic ? "static " : "") + type + " " + name;
                body = isStatic ? " = (" + type + ") " + ask + "null, null);\n" : body;
            } else if (element instanceof ExecutableElement method) {
                StringJoiner arguments = new StringJoiner(", ", ", new Object[] {", "}); }\n");
                for (int i = 0; i < method.getParameters().size(); i++) {
                    arguments.add("a" + i);
                }
                boolean isInner = owner.getNestingKind().isNested() && !owner.getModifiers().contains(Modifier.STATIC);
                if (element.getKind() == ElementKind.CONSTRUCTOR) {
                    if (isInner || owner.getKind() == ElementKind.ENUM) {
                        return "";
                    }
                    head = owner.getSimpleName() + signature(method);
                    body = " { NanoRlhfTests.construct(this, \"" + elements.getBinaryName(owner) + "\", \"" + erased(method)
                        + "\"" + arguments;
                } else if (isOfObject(method) || owner.getKind() == ElementKind.ENUM && isStatic
                    && (name.equals("values") || name.equals("valueOf"))) {
                    return "";
                } else {
                    TypeMirror result = method.getReturnType();
                    head = (isInterface && !isStatic ? "default " : "public ") + (isStatic ? "static " : "")
                        + parameters(method.getTypeParameters()) + " " + result + " " + name + signature(method);
                    body = " { " + (result.getKind() == TypeKind.VOID ? "" : "return (" + result + ") ") + ask
                        + "\"" + erased(method) + "\", " + (isStatic ? "null" : "this") + arguments;
                }
            } else {
                return "";
            }
            boolean isSafe = namesIn(head, closed).isEmpty() && !head.contains("@"); // an annotation may contain any text
            return isSafe ? head + body : "";
        }

        private String classStub(TypeElement type, boolean isNested) {
            boolean isInterface = type.getKind() == ElementKind.INTERFACE;
            boolean isEnum = type.getKind() == ElementKind.ENUM;
            StringBuilder text = new StringBuilder(isNested ? "public static " : "");
            text.append(isInterface ? "interface " : isEnum ? "enum " : "class ").append(type.getSimpleName());
            text.append(parameters(type.getTypeParameters()));
            List<String> interfaces = new ArrayList<>();
            type.getInterfaces().forEach(each -> interfaces.add(each.toString()));
            interfaces.removeIf(each -> namesIn(each, own.keySet()).isEmpty() || each.contains("."));
            String base = type.getSuperclass().toString();
            boolean hasBase = own.containsKey(base);
            text.append(hasBase ? " extends " + base : "");
            if (!interfaces.isEmpty()) {
                text.append(isInterface ? " extends " : " implements ").append(String.join(", ", interfaces));
            }
            text.append(" {\n");
            if (isEnum) {
                text.append(type.getEnclosedElements().stream().filter(e -> e.getKind() == ElementKind.ENUM_CONSTANT)
                    .map(e -> e.getSimpleName().toString()).collect(Collectors.joining(", "))).append(";\n");
            }
            boolean isBase = own.values().stream()
                .anyMatch(each -> types.asElement(each.getSuperclass()) == type);
            if (isBase && type.getTypeParameters().isEmpty()) { // only for subclasses
                text.append(type.getSimpleName()).append("(NanoRlhfTests.None a, NanoRlhfTests.None b) { ")
                    .append(hasBase ? "super(a, b); " : "").append("}\n");
            }
            for (Element member : type.getEnclosedElements()) {
                if (member.getKind() != ElementKind.ENUM_CONSTANT) {
                    String one = stub(member, type, isInterface);
                    boolean callsBase = hasBase && member.getKind() == ElementKind.CONSTRUCTOR;
                    text.append(callsBase ? one.replace(") { ", ") { super((NanoRlhfTests.None) null, null); ") : one);
                }
            }
            return text.append("}\n").toString();
        }

        /** Never answered by a class of the response: it must not decide what is equal. */
        private static boolean isOfObject(ExecutableElement method) {
            String name = method.getSimpleName().toString();
            int count = method.getParameters().size();
            return name.equals("equals") && count == 1 || name.equals("hashCode") && count == 0
                || Set.of("getClass", "finalize", "clone", "wait", "notify", "notifyAll").contains(name);
        }

        private static String parameters(List<? extends TypeParameterElement> parameters) {
            if (parameters.isEmpty()) {
                return "";
            }
            return parameters.stream().map(p -> p + p.getBounds().stream().map(TypeMirror::toString)
                .collect(Collectors.joining(" & ", " extends ", ""))).collect(Collectors.joining(", ", "<", ">"));
        }

        /** Parameters and exceptions: only the JDK's; the program's exceptions arrive as unchecked ones. */
        private static String signature(ExecutableElement method) {
            List<String> parts = new ArrayList<>();
            for (VariableElement parameter : method.getParameters()) {
                parts.add(parameter.asType() + " a" + parts.size());
            }
            if (method.isVarArgs()) {
                int last = parts.size() - 1;
                parts.set(last, parts.get(last).replaceFirst("\\[\\] (a\\d+)$", "... $1"));
            }
            String jdk = method.getThrownTypes().stream().map(TypeMirror::toString).filter(t -> t.contains("."))
                .collect(Collectors.joining(", "));
            return "(" + String.join(", ", parts) + ")" + (jdk.isEmpty() ? "" : " throws " + jdk);
        }

        private String erased(ExecutableElement method) {
            return method.getParameters().stream().map(parameter -> types.erasure(parameter.asType()).toString())
                .collect(Collectors.joining(","));
        }
    }

    private static class Source extends SimpleJavaFileObject {
        private final String text;

        Source(String name, String text) {
            super(URI.create("string:///" + name + ".java"), Kind.SOURCE);
            this.text = text;
        }

        @Override public CharSequence getCharContent(boolean ignoreEncodingErrors) {
            return text;
        }
    }

    private static class InMemory extends ForwardingJavaFileManager<StandardJavaFileManager> {
        private final Map<String, byte[]> classes;
        private final Set<String> promptClasses;

        InMemory(Map<String, byte[]> classes, Set<String> promptClasses) {
            super(FILES);
            this.classes = classes;
            this.promptClasses = promptClasses;
        }

        @Override public JavaFileObject getJavaFileForOutput(
            JavaFileManager.Location location, String name, JavaFileObject.Kind kind, FileObject sibling
        ) {
            if (!sibling.getName().endsWith("Main.java")) {
                promptClasses.add(name);
            }
            return new SimpleJavaFileObject(URI.create("memory:///" + name.replace('.', '/') + kind.extension), kind) {
                @Override public OutputStream openOutputStream() {
                    return new ByteArrayOutputStream() {
                        @Override public void close() {
                            classes.put(name, toByteArray());
                        }
                    };
                }
            };
        }
    }
}
